"""`zstore.Init`: a model is built normally, and its parameters are sharded as they are created.

[Note: what the block sees]
torch's registration hooks report every parameter and module that is registered in a module; a torch function mode sees every
call of a torch function, including access to attributes of tensors, with its arguments. So user code runs unchanged: a
parameter is unsharded before any access. Other threads are not observed. See also [Note: a released parameter].
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from zstore.errors import UsageError
from zstore.format import ArraySpec
from zstore.io.memory import dtype_name
from zstore.ranks.world import World

from ..config.config import Config, load_config
from ..runtime.process import CollectorPause, init_distributed, show_messages
from .builder import DEFAULT_LIVE_BYTES, Builder, BuildStatistics, open_blocks, seen_by_init, trained
from .store import builder_for


class Init(AbstractContextManager["Init"]):
    """Within the block, models are built in shards, with the same values as outside of it, but in little memory (all ranks).

    `config` (or `config_dict_or_path`) is the config of `initialize`. Each rank's rows of large parameters go to the config's
    tier for them: at stage 3 with several ranks or `offload_param`, and whenever the optimizer's state is offloaded. Without
    a config they go to host memory. If that saves nothing, the block does nothing.

    At most `live_bytes` of large parameters stay in memory, in addition to the one in use. `dtype` is the default
    floating-point dtype within the block. `module` is an existing model, which is sharded immediately.

    `remote_device` names the rows' tier: "cpu" changes nothing, and "nvme" needs a config that offloads parameters there.
    `pin_memory` and `mem_efficient_linear` are accepted and ignored: the config determines pinning, and values depend on
    neither.

    Every rank must run the same code with the same seed, or the block ends with UsageError. After the block a sharded
    parameter reads as NaN; within it, within the same block entered again, or within `zstore.gather`, it has its values. After
    an error in the block no files remain.

    Raises UsageError for nested blocks and for parameters on the meta device, and any error from opening a store.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's arguments
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        live_bytes: int = DEFAULT_LIVE_BYTES,
        remote_device: str | None = None,
        pin_memory: bool = False,
        mpu: Any = None,
        mem_efficient_linear: bool = True,
        _from_rank_0: bool = False,
    ) -> None:
        if config is not None and config_dict_or_path is not None and config != config_dict_or_path:
            raise UsageError("Init() got different configs in config and config_dict_or_path: pass one")
        if mpu is not None:
            raise UsageError(
                "Init(mpu=...): parameters are sharded over all ranks, since model parallelism is not supported; omit mpu"
            )
        self._source = config if config is not None else config_dict_or_path
        self._remote_device = remote_device
        self._enabled = enabled
        self._dtype = dtype
        self._from_rank_0 = _from_rank_0
        self._live_bytes = live_bytes
        self._builder: Builder | None = None
        self._cleanup = ExitStack()
        self._meta: list[tuple[weakref.ref[nn.Module], str]] = []
        self._thread = 0
        self._ignores_hooks = False
        self._is_new = True
        if module is not None and enabled:
            with self:
                self._register_module(module)

    def __enter__(self) -> Self:
        if not self._enabled:
            return self
        if open_blocks:
            raise UsageError("zstore.Init blocks cannot be nested: build the whole model within one block")
        self._open()
        with ExitStack() as stack:
            open_blocks.append(self)
            stack.callback(open_blocks.remove, self)
            if self._dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
            stack.callback(register_module_parameter_registration_hook(self._on_parameter).remove)
            if self._builder is not None:
                self._watch(self._builder, stack)
            self._cleanup = stack.pop_all()
        return self

    def _open(self) -> None:
        """Open the store if anything is to be sharded."""
        if self._builder is not None and self._builder.is_open:
            self._is_new = False
            return
        show_messages()
        init_distributed()
        world = World.current()
        config = None if self._source is None else load_config(self._source)
        _check_remote_device(self._remote_device, config)
        self._builder, self._is_new = builder_for(config, world)
        if self._builder is not None and self._from_rank_0:
            self._builder.from_rank_0 = True

    def _watch(self, builder: Builder, stack: ExitStack) -> None:
        """Install the hooks of [Note: what the block sees]."""
        self._thread = threading.get_ident()
        self._meta.clear()
        stack.enter_context(builder.guard.suspended())
        if builder.world.world_size > 1:
            stack.callback(CollectorPause().end)
        stack.callback(register_module_module_registration_hook(self._on_module).remove)
        stack.enter_context(_BeforeFunctions(self._unshard_arguments))

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if not self._enabled or self not in open_blocks:
            return
        self._cleanup.close()
        builder = self._builder
        if builder is None:
            return
        if value is None or not self._is_new:
            self._end(builder, value)
        else:
            if isinstance(value, Exception) and not builder.failed:
                with suppress(Exception):
                    builder.agree("the end of the block", value)
            builder.close()

    def _end(self, builder: Builder, raised: BaseException | None) -> None:
        """Release live parameters, and compare them with the other ranks'."""
        error = raised
        try:
            builder.release_all()
            if error is None:
                error = self._meta_error()
        except Exception as failure:
            error = error or failure
        owners = builder.owners()
        builder.guard.watch(builder)
        try:
            builder.agree_on_values(error)
            if not owners:
                builder.close()
        except BaseException as failure:
            if self._is_new:
                builder.close()
            if failure is not raised:
                raise

    def _meta_error(self) -> UsageError | None:
        for ref, name in self._meta:
            module = ref()
            parameter = None if module is None else module._parameters.get(name)
            if parameter is not None and parameter.is_meta:
                return UsageError(
                    f"parameter {name!r} of a {type(module).__name__} is on the meta device and has no values: zstore.Init "
                    "creates models with values. Do not use the meta device, or load weights with zstore.from_pretrained()"
                )
        return None

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if self._builder is None and parameter is not None:
            seen_by_init[parameter] = None
        elif parameter is not None and not self._ignores_hooks and threading.get_ident() == self._thread:
            with self._ignoring_hooks() as builder:
                self._register(builder, module, name, parameter)

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Register parameters that no hook has reported, such as those of a copied module."""
        if child is not None and not self._ignores_hooks and threading.get_ident() == self._thread:
            with self._ignoring_hooks():
                self._register_module(child)

    def shard_parameter(self, module: nn.Module, name: str) -> None:
        """Shard the parameter `name` of a module after its engine released it, if the block shards any."""
        if (parameter := module._parameters[name]) is None:
            return
        trained.pop(parameter, None)  # type: ignore[no-untyped-call]
        if self._builder is not None:
            with self._ignoring_hooks() as builder:
                self._register(builder, module, name, parameter)

    def _register_module(self, root: nn.Module) -> None:
        builder = self._builder
        if builder is None:
            return
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and builder.find(parameter) is None:
                    self._register(builder, module, name, parameter)

    def _register(self, builder: Builder, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if parameter in trained:
            return
        seen_by_init[parameter] = None
        if parameter.is_meta:
            self._meta.append((weakref.ref(module), name))
        elif parameter.numel() >= builder.threshold_numel and _can_be_stored(parameter):
            built = builder.register(parameter, module, f"{name!r} of a {type(module).__name__}")
            # The newest one stays, since it is not initialized yet.
            builder.release_down_to(self._live_bytes, {built.number})

    @contextmanager
    def _ignoring_hooks(self) -> Iterator[Builder]:
        """Make the hooks ignore operations within the block."""
        if self._builder is None:
            raise UsageError("this zstore.Init shards nothing")
        self._ignores_hooks = True
        try:
            yield self._builder
        finally:
            self._ignores_hooks = False

    def _unshard_arguments(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Unshard the parameters in a torch function's arguments."""
        if self._ignores_hooks or self._builder is None:
            return
        find = self._builder.find
        touched = [built for tensor in _tensors((args, kwargs)) if (built := find(tensor)) is not None]
        if not touched:
            return
        with self._ignoring_hooks() as builder:
            keep = {built.number for built in touched}
            missing = {built.number: built for built in touched if built.placeholder is not None}
            needed_bytes = sum(b.rows.spec.nbytes for b in missing.values() if b.rows is not None)
            builder.release_down_to(self._live_bytes - needed_bytes, keep)
            target = args[0] if args else kwargs.get("tensor")
            overwrites = len(touched) == 1 and function in _overwriting() and target is touched[0].ref()
            for built in touched:
                builder.make_live(built, overwritten=overwrites)

    def statistics(self) -> BuildStatistics:
        """Return the bytes of large parameters that were built and not yet passed to `initialize`."""
        return BuildStatistics() if self._builder is None else self._builder.statistics()

    def close(self) -> None:
        """Remove the files of models that were built and not passed to `initialize`; their values are lost."""
        if self._builder is not None:
            self._builder.close()


class _BeforeFunctions(TorchFunctionMode):
    """Reports every torch function that depends on values before it runs."""

    def __init__(self, before: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _value_independent():
            self._before(func, args, kwargs)
        return func(*args, **kwargs)


def _check_remote_device(device: str | None, config: Config | None) -> None:
    """Raise UsageError for a `remote_device` that cannot hold parameters."""
    if device not in (None, "none", "cpu", "nvme"):
        raise UsageError(f'Init(remote_device={device!r}): expected "cpu", "nvme" or None')
    if device == "nvme" and (config is None or config.offload_param.device != "nvme"):
        raise UsageError(
            'Init(remote_device="nvme"): the config names no folder: pass a config with zero_optimization.stage 3 and '
            'offload_param {"device": "nvme", "nvme_path": FOLDER}'
        )


@cache
def _value_independent() -> frozenset[Any]:
    """Return the torch functions whose result depends on neither the values nor the storage of a parameter."""
    read = (
        "shape ndim dtype device layout requires_grad grad is_leaf is_meta is_cuda is_cpu is_sparse is_quantized grad_fn "
        "itemsize nbytes _backward_hooks _version"
    )
    tensor: Any = torch.Tensor
    return frozenset([
        *(getattr(tensor, name).__get__ for name in read.split()), tensor.requires_grad.__set__, tensor.grad.__set__,
        tensor.size, tensor.dim, tensor.numel, tensor.nelement, tensor.element_size, tensor.__len__,
        tensor.is_floating_point, tensor.is_complex, tensor.requires_grad_, tensor.register_hook,
        tensor.register_post_accumulate_grad_hook, torch.is_floating_point, torch.is_complex, torch.numel,
        torch.is_tensor,
    ])  # fmt: skip


@cache
def _overwriting() -> frozenset[Any]:
    """Return the torch functions that set every element of their first argument and read none of it."""
    init, tensor = nn.init, cast("Any", torch.Tensor)
    return frozenset([
        init.normal_, init.uniform_, init.trunc_normal_, init.constant_, init.ones_, init.zeros_, init.eye_, init.dirac_,
        init.xavier_normal_, init.xavier_uniform_, init.kaiming_normal_, init.kaiming_uniform_, init.orthogonal_,
        init.sparse_, tensor.normal_, tensor.uniform_, tensor.zero_, tensor.fill_, tensor.copy_, tensor.data.__set__,
    ])  # fmt: skip


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments, including those in lists, tuples and dicts (also subclasses, unlike pytree)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _can_be_stored(parameter: nn.Parameter) -> bool:
    """Return whether the store can hold the parameter; others stay in memory."""
    if type(parameter) is not nn.Parameter or is_lazy(parameter):
        return False
    try:
        ArraySpec(name="building/0", shape=tuple(parameter.shape), dtype=dtype_name(parameter.dtype))
    except UsageError:
        return False
    return parameter.layout == torch.strided


def require_no_open_block(call: str) -> None:
    """Raise UsageError if `call` is made within a block of `zstore.Init`."""
    if any(init._builder is not None for init in open_blocks):
        raise UsageError(f"{call} cannot be called within `with zstore.Init(...)`: end the block first")
