"""A record for each parameter: its name, its rows, its buffers.

[Note: the storage of a parameter]
`full` is a 1-D alias of the gathered values: writing through it does not increment the parameter's version, so autograd
accepts tensors saved earlier. When a sharded parameter (stage 3) is released, that storage is resized to zero, and
gathering fills the same storage again, since saved tensors alias it. If all rows are stored in memory on which the device
computes, `full` is that memory: gathering and releasing neither move nor free anything (`is_in_place`).

A released parameter is a `ReleasedParameter`, also while it is prefetched or kept: torch passes it every operation on the
parameter, and it gathers first (`on_read`) or raises. Its data is a stride-0 view of one NaN with its shape and dtype,
for C++ code that bypasses Python: empty storage would crash the process.

Between its uses a sharded parameter has this rank's rows in `shard` or, if offloaded, in an array of the store. Gathered
buffers and `shard` have room for the grid's padding: rows are sent without a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from types import GetSetDescriptorType, new_class
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zstore.errors import UsageError
from zstore.format import ArraySpec, Grid
from zstore.io import advise_huge_pages
from zstore.io.memory import dtype_name

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a precision in a config -> torch dtype."""
OTHER_MODES = 'set "step_overlap" to "forward" or "none" in the config\'s section "zstore"'
"""Advice in errors specific to step mode `backward`, which "auto" may have chosen."""


EndRead = Callable[[Any], None]


class Residency(Enum):
    """Where a parameter's values are."""

    RESIDENT = "resident"
    """All values, always in `full`; this rank's rows are a part of it."""
    GATHERED = "gathered"
    """All values, in `full` until it is released; this rank's rows stay in `shard` too."""
    RELEASED = "released"
    """Only this rank's rows, in `shard` or `stored_array`; `full` has no storage, or storage that nothing reads."""


@dataclass(eq=False)
class RowsInStore:
    """This rank's rows of a parameter in an existing array; see `optim.state.OptimizerState.add`."""

    array: str
    is_adopted: bool = False
    """Whether the array has become the parameter's own."""


@dataclass(eq=False, kw_only=True)
class ParameterRecord:
    """The engine's data about one parameter; the parameter itself gets no attributes from the engine unless it is released."""

    name: str
    """Fully qualified name; of a tied parameter, the first in module order."""
    aliases: tuple[str, ...]
    """Its other names."""
    parameter: nn.Parameter
    grid: Grid
    """Its partition over all ranks, and over a checkpoint's files, at every stage."""
    state_grid: Grid
    """Partition of its state: `grid`, or one shard of everything if state is not sharded."""
    state_shard: int
    """Index of this rank's shard on `state_grid`."""
    world_size: int
    """Number of ranks of `grid`."""
    group: int | None
    """Index of its parameter group; None: frozen, or not given to the optimizer."""
    full: torch.Tensor = field(repr=False)
    """1-D [numel]. See [Note: the storage of a parameter]."""
    shard: torch.Tensor | None = None
    """1-D, this rank's rows without padding; None if the parameter is resident or offloaded."""
    stored_array: str | None = None
    """Array of the store with this rank's rows of an offloaded parameter: `parameter/<name>`, or `model/<name>` if that has
    the parameter's dtype."""
    is_in_place: bool = False
    """Whether `full` is an alias of the rows in the store."""
    residency: Residency = Residency.RESIDENT
    on_read: Callable[[ParameterRecord, Any], EndRead | None] | None = None
    """Gathers the released parameter for an operation (a torch function), or raises UsageError; may return a function to
    call with the operation's output. None: it cannot be gathered."""
    gather_for_copy: Callable[[list[nn.Parameter]], AbstractContextManager[None]] | None = None
    """Gathers released parameters to copy them; None: that needs all ranks."""
    detaches_empty: bool = False
    """Whether `detach()` of the released parameter returns an empty tensor, for its module's state dict."""
    is_rounded: bool = False
    """Whether the values were gathered with reduced precision: this rank's part of them differs from its stored rows."""
    address: int = field(init=False)
    """Address of the values that the engine gave the parameter; a different address means that other code replaced them."""
    shape: torch.Size = field(init=False)
    """The parameter's original shape, for the same check."""
    version: int = field(init=False)
    """The parameter's version after the engine's last change; a different one means that other code wrote to it."""

    def __post_init__(self) -> None:
        self.address, self.shape = self.full.data_ptr(), self.parameter.shape
        self.note_version()

    def note_version(self) -> None:
        """Record the current version of the parameter as the engine's own change."""
        self.version = 0 if self.parameter.is_inference() else self.parameter._version

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return self.full.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameter and of its gradient."""
        return self.full.dtype

    @cached_property
    def owned_range(self) -> tuple[int, int]:
        """Global flat elements `[first, stop)` whose state this rank owns."""
        first = min(self.numel, self.state_shard * self.state_grid.shard_numel)
        return first, first + self.state_grid.shard_valid_numel(self.state_shard)

    @property
    def owned_numel(self) -> int:
        """Elements of this rank's rows."""
        return self.owned_range[1] - self.owned_range[0]

    def owned(self) -> torch.Tensor:
        """Return this rank's own rows, 1-D without padding: the tensor to which an update writes.

        Raises UsageError if they are in the store.
        """
        if self.stored_array is not None:
            raise UsageError(
                f"parameter {self.name!r} is in the store as {self.stored_array!r}: read or write it there"
            )
        if self.shard is not None:
            return self.shard
        first, stop = self.owned_range
        return self.full if stop - first == self.full.numel() else self.full[first:stop]

    def spec(self, group: str, dtype: torch.dtype) -> ArraySpec:
        """Return the array of this parameter in `group` ("model", "optimizer/exp_avg")."""
        return ArraySpec(
            name=f"{group}/{self.name}",
            shape=tuple(self.parameter.shape),
            dtype=dtype_name(dtype),
            aliases=self.aliases if group == "model" else (),
        )

    def keep_shard(self, rows: torch.Tensor | None = None) -> None:
        """Copy this rank's rows, or 1-D `rows` in place of them, to `shard`, and release the parameter."""
        first, stop = self.owned_range
        self.shard = self.full.new_zeros(self.state_grid.shard_numel)[: stop - first]
        self.shard.copy_(self.full[first:stop] if rows is None else rows)
        self.release()

    def padded_shard(self) -> torch.Tensor:
        """Return `shard` followed by its zero padding, 1-D [shard_numel]."""
        if self.shard is None:
            raise UsageError(f"parameter {self.name!r} has no separate shard")
        return self.shard.as_strided((self.state_grid.shard_numel,), (1,))

    def padded_full(self, numel: int) -> torch.Tensor:
        """Return `full` followed by its padding, 1-D [numel]: the rows of all ranks, or of all that share a replica."""
        return self.full.as_strided((numel,), (1,))

    def new_full(self) -> torch.Tensor:
        """Return an uninitialized buffer for all values, 1-D [numel], that can also be written to after inference mode."""
        with torch.inference_mode(False):
            return torch.empty(self.numel, dtype=self.dtype, device=self.full.device)

    def use_in_place(self, memory: torch.Tensor | None) -> None:
        """Use 1-D `memory`, which stores all rows of a released parameter, as `full`; None: use a separate buffer."""
        self.release()
        self.is_in_place = memory is not None
        self.full = self.new_full() if memory is None else memory
        self.release()

    def allocate_full(self) -> None:
        """Allocate the storage of `full`, with undefined values, before a gather; do nothing if it was never freed."""
        if self.is_in_place:
            return
        padded_numel = self.grid.shard_numel * self.world_size  # a replica's rows have no more
        self.full.untyped_storage().resize_(padded_numel * self.full.element_size())
        if self.full.device.type == "cpu":
            advise_huge_pages(self.full.data_ptr(), padded_numel * self.full.element_size())

    def release(self) -> None:
        """Free the gathered values; the parameter becomes a `ReleasedParameter`."""
        self.use_placeholder()
        self.is_rounded = False
        if not self.is_in_place:
            if not self.full.untyped_storage().resizable():  # a numpy array shares the storage, and keeps it alive
                self.full = self.new_full()
            self.full.untyped_storage().resize_(0)

    def use_full(self) -> None:
        """Give the parameter the gathered values."""
        self.use_values(self.full.view(self.shape))
        self.residency = Residency.GATHERED

    def use_placeholder(self) -> None:
        """Turn the parameter into a `ReleasedParameter`, without freeing the gathered values."""
        self.use_values(self._placeholder)
        self.parameter.__dict__["record"] = self
        self.parameter.__class__ = _released_kind(type(self.parameter))
        self.residency = Residency.RELEASED

    def use_values(self, values: torch.Tensor) -> None:
        """Make the parameter an alias of `values`."""
        if isinstance(self.parameter, ReleasedParameter):
            del self.parameter.__dict__["record"]
            self.parameter.__class__ = type(self.parameter).__bases__[-1]  # see `_released_kind`
        self.parameter.data = values
        self.address = values.data_ptr()

    def restore(self) -> None:
        """Restore the parameter's storage if other code replaced it."""
        if self.residency is Residency.RELEASED:
            self.use_placeholder()
        else:
            self.use_values(self.full.view(self.shape))

    @cached_property
    def _placeholder(self) -> torch.Tensor:
        return view_of_one_nan(self.shape, self.dtype, self.full.device)

    def gradient_edge(self) -> torch.autograd.graph.GradientEdge:
        """Return the parameter's edge in autograd graphs, which needs no values."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(self.parameter)

    def no_values_error(self, func: Any) -> UsageError:
        """Return the error of an operation that needs the values of the released parameter."""
        operation = torch.overrides.resolve_name(func) or func.__name__
        if self.on_read is None:
            return UsageError(
                f"{operation} of parameter {self.name!r}, which has no values: its engine was closed, or offload_states() "
                "moved them (engine.reload_states() restores them)"
            )
        return UsageError(
            f"{operation} of parameter {self.name!r} outside a forward: it is sharded or offloaded, and is materialized "
            "only in the model's forward and backward. Compute such terms within the forward; to read values write `with "
            "zstore.gather(parameter):` on all ranks, and to change them `with zstore.gather(parameter, modifier_rank=0):`"
        )


class ReleasedParameter(nn.Parameter):
    """A parameter without its values. See [Note: the storage of a parameter].

    An operation that needs them gathers it by its record's `on_read`, and then runs on an ordinary parameter. Shape,
    dtype, gradient and hooks need no values. A copy is an ordinary parameter with the values.
    """

    record: ParameterRecord

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Execute an operation with released parameters. Raises UsageError if they cannot be gathered."""
        kwargs = kwargs or {}
        operands = (*args[1:], *kwargs.values())
        needs_none = func in _WITHOUT_VALUES and not (operands and func is torch.Tensor.type)
        if needs_none and not any(isinstance(operand, ReleasedParameter) for operand in operands):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.detach and args[0].record.detaches_empty:
            return args[0].new_empty(0)
        if func is torch.autograd.grad:
            given = (tuple(args), dict(kwargs))
            edge_args, edge_kwargs = tree_map_only(ReleasedParameter, lambda p: p.record.gradient_edge(), given)
            return func(*edge_args, **edge_kwargs)
        ends: list[EndRead] = []

        def gather(parameter: ReleasedParameter) -> nn.Parameter:
            if isinstance(parameter, ReleasedParameter):  # not gathered with the unit of an earlier argument
                record = parameter.record
                if record.on_read is None:
                    raise record.no_values_error(func)
                end = record.on_read(record, func)
                ends.extend(() if end is None else (end,))
            return parameter

        output = None
        try:
            tree_map_only(ReleasedParameter, gather, (tuple(args), dict(kwargs)))
            output = func(*args, **kwargs)
        finally:
            for end in ends:
                end(output)
        return output

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, dtype = tuple(self.record.shape), self.record.dtype
        return f"Parameter({self.record.name!r}, shape={shape}, dtype={dtype}, its values are sharded or offloaded)"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return self._copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _copy(self) -> nn.Parameter:
        if self.record.gather_for_copy is None:
            raise UsageError(
                f"cannot copy a module whose parameter {self.record.name!r} is sharded: copy it within `with "
                "zstore.gather(module):` on all ranks, or use engine.module_state_dict()"
            )
        with self.record.gather_for_copy([self]):
            return copy.deepcopy(self)


@cache
def _released_kind(kind: type[nn.Parameter]) -> type[ReleasedParameter]:
    """Return the class of a released parameter of this class, which is its last base."""
    return ReleasedParameter if kind is nn.Parameter else new_class(kind.__name__, (ReleasedParameter, kind))


def _without_values() -> Iterator[Any]:
    """Yield the operations that need no values: attributes, sizes, hooks, new tensors of the same kind."""
    sizes = "size dim ndimension numel nelement element_size stride storage_offset dim_order __len__"
    methods = "get_device type data_ptr untyped_storage requires_grad_ retain_grad register_hook"
    names = {*sizes.split(), *methods.split(), "register_post_accumulate_grad_hook"}
    for name in dir(torch.Tensor):
        attribute = getattr(torch.Tensor, name)
        if isinstance(attribute, GetSetDescriptorType | property):
            if name not in ("data", "T", "mT", "H", "mH", "real", "imag"):
                yield from (attribute.__get__, attribute.__delete__)
            if name not in ("real", "imag"):
                yield attribute.__set__
        elif name.startswith(("new_", "is_")) or name in names:
            yield attribute
    for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros"):
        yield getattr(torch, f"{name}_like")
    yield from (torch.numel, torch.is_complex, torch.is_floating_point, torch.is_same_size, torch.result_type)


_WITHOUT_VALUES = frozenset(_without_values()) - {torch.Tensor.is_nonzero, torch.Tensor.is_set_to}


def view_of_one_nan(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of this shape whose elements all alias one NaN, or 0 in a dtype without NaN."""
    value = torch.full((1,), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
    return value.expand(shape.numel()).view(shape) if shape.numel() else value[:0].view(shape)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...], nn.Parameter]]:
    """Yield (name, other names, parameter), each parameter once, in module order.

    Raises UsageError if two parameters share memory but are different objects: training would make them diverge.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    seen: dict[int, str] = {}
    for parameter, (name, *aliases) in names.items():
        if parameter.numel() and not parameter.is_meta:
            other = seen.setdefault(parameter.data_ptr(), name)
            if other != name:
                raise UsageError(
                    f"parameters {other!r} and {name!r} share memory but are two objects, so training would make them diverge: "
                    f"assign the parameter itself (`a.weight = b.weight`) before initialize()"
                )
        yield name, tuple(aliases), parameter
