"""Update kernel of optimizers that keep their state in blocks along the flat parameter, with a scale for each block.

[Note: state in blocks]
Such a class (8-bit Adam) keeps of a large parameter codes of the parameter's shape, and a number or more for each block of so
many elements; of a small one it keeps the state of a plain class. An update of whole blocks is the same anywhere in the
parameter. So the class's own `step` runs on a proxy parameter over piece after piece of whole blocks, with state objects
of the class's own types around views of the store's arrays. The parts of those objects are read off a probe: tensors of
the parameter's shape, tensors of one value a block, constants (lookup tables), and step counts.
Pieces have few lengths, since a class may compile its step for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zstore.engine.optim.kernel import Kernel, ParameterStep, Scalars, SlotArray
from zstore.errors import UsageError

Blocks = Callable[[int, Mapping[str, Any]], int | None]
"""Gives how many elements a block of the state has, of a parameter of so many elements and with these settings of the
optimizer; None if the state is not in blocks."""

_PLAIN_NUMELS = (16, 3, 1)
_MOST_PROBED = 1 << 22
_PIECES = (256, 16, 1)
"""Lengths of pieces, in blocks."""


def parts_of(value: torch.Tensor) -> dict[str | None, torch.Tensor]:
    """Return the tensors that make up a tensor, by attribute; itself, under None, if it is a plain one."""
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        return {None: value}
    return {name: getattr(value, name) for name in flatten()[0]}


def made_of(like: torch.Tensor, parts: Mapping[str | None, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the type of `like`, made of other parts."""
    if None in parts:
        return parts[None]
    kind, first = type(like), next(iter(parts.values()))
    _, context = like.__tensor_flatten__()  # type: ignore[attr-defined]
    made: torch.Tensor = kind.__tensor_unflatten__(dict(parts), context, first.shape, first.stride())  # type: ignore[attr-defined]
    return made


class StateForm:
    """A class's state of parameters, all in blocks or none."""

    def __init__(self, kind: str, state: Mapping[str, Any], numel: int, block: int | None) -> None:
        self.block = block
        self.like = {name: value for name, value in state.items() if value is not None}
        found: list[SlotArray] = []
        for entry, value in self.like.items():
            if _is_scalar(value):
                continue
            for part, tensor in parts_of(value).items():
                array = _array(entry, part, tensor, numel, block)
                if array is not None:
                    found.append(array)
                elif block is None or tensor.dtype == torch.uint8:
                    raise UsageError(
                        f"optimizer {kind}: its state {entry!r} has a tensor of shape {list(tensor.shape)} for a parameter of "
                        f"{numel} elements, neither one value an element nor one a block, so it cannot be cut into tiles"
                    )
        self.arrays = tuple(found)

    def scalars(self) -> list[str]:
        """Return the names of step counts."""
        return [name for name, value in self.like.items() if _is_scalar(value)]

    def numbers(self, scalars: Scalars) -> dict[str, Any]:
        """Return the step counts in the class's own form."""
        return {
            name: torch.full_like(like, scalars[name]) if isinstance(like, torch.Tensor) else type(like)(scalars[name])
            for name, like in self.like.items()
            if _is_scalar(like)
        }

    def state(self, scalars: Scalars, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state in the class's own form, made of `scalars` and of tensors by the arrays' names."""
        by_place = {(array.entry, array.part): values[array.name] for array in self.arrays}
        made: dict[str, Any] = self.numbers(scalars)
        return {
            name: made[name]
            if name in made
            else made_of(like, {part: by_place.get((name, part), own) for part, own in parts_of(like).items()})
            for name, like in self.like.items()
        }


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _array(entry: str, part: str | None, tensor: torch.Tensor, numel: int, block: int | None) -> SlotArray | None:
    name = entry if part is None else f"{entry}.{part}"
    if tensor.shape == (numel,):
        return SlotArray(name, tensor.dtype, 1, entry, part)
    if block is not None and tensor.shape == (-(-numel // block),):
        return SlotArray(name, tensor.dtype, block, entry, part)
    return None


class BlockKernel(Kernel):
    """Steps a class that keeps state in blocks; that of a parameter that was never updated must be zeros, and its counts 0."""

    def __init__(self, kind: type[torch.optim.Optimizer], settings: Mapping[str, Any], blocks: Blocks) -> None:
        self._kind = kind
        self._accepted = {n: settings[n] for n in inspect.signature(kind.__init__).parameters if n in settings}
        self._accepted.pop("params", None)
        self._blocks = blocks
        self._proxy = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = self.make(self._proxy)
        self._group = self._optimizer.param_groups[0]
        self.numel_in_blocks = numel = next((n for n in _sizes() if self.block_of(n) is not None), None)
        """A number of elements of a parameter whose state is in blocks."""
        self._in_blocks = None if numel is None else self._probe(numel)
        plain = next((n for n in _PLAIN_NUMELS if self.block_of(n) is None), None)
        self._plain = None if plain is None else self._probe(plain)
        forms = [form for form in (self._plain, self._in_blocks) if form is not None]
        self.slots = tuple(dict.fromkeys(array.name for form in forms for array in form.arrays))
        """Names of all arrays that a parameter may have; see `arrays`."""

    def make(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        """Return an optimizer of the class, with the group's settings, for one parameter."""
        return self._kind([parameter], **self._accepted)

    def block_of(self, numel: int) -> int | None:
        """Return how many elements a block has, of the state of a parameter of `numel` elements; None: not in blocks."""
        return self._blocks(numel, self._accepted)

    def _probe(self, numel: int) -> StateForm:
        parameter = torch.nn.Parameter(torch.zeros(numel))
        optimizer = self.make(parameter)
        counts = []
        with torch.compiler.set_stance("force_eager"):  # nothing is compiled for a shape that nobody has
            for _ in range(2):
                parameter.grad = torch.linspace(-1, 1, numel)
                optimizer.step()
                state = optimizer.state[parameter]
                counts.append([float(value) for value in state.values() if value is not None and _is_scalar(value)])
        form = StateForm(self._kind.__name__, state, numel, self.block_of(numel))
        if any(count != [float(steps)] * len(count) for steps, count in enumerate(counts, 1)):
            raise UsageError(
                f"optimizer {self._kind.__name__} keeps numbers of a parameter that are no step counts ({form.scalars()}), "
                "and cannot be offloaded"
            )
        return form

    @property
    def takes_shards(self) -> bool:
        """Whether the class keeps a parameter's blocks in one tensor of its own type, which a DTensor can be made of."""
        return self._in_blocks is None or all(array.part is not None for array in self._in_blocks.arrays)

    def form(self, numel: int) -> StateForm:
        """Return the state of a parameter of `numel` elements."""
        form = self._plain if self.block_of(numel) is None else self._in_blocks
        if form is None:
            raise UsageError(
                f"optimizer {self._kind.__name__}: its blocks were not found for a parameter of {numel} elements: `block` must "
                f"say them alike for all sizes, and for some multiple of 3 under {_MOST_PROBED}"
            )
        return form

    def arrays(self, numel: int, shape: Sequence[int]) -> tuple[SlotArray, ...]:
        """Return the arrays of a parameter of `numel` elements, in the order of a tile's slots."""
        return self.form(numel).arrays

    def keep(self, group: dict[str, Any]) -> None:
        """Turn settings into tensors that the class itself keeps as tensors."""
        group.update({name: value for name, value in self._kept(group).items() if name in group})

    def _kept(self, group: Mapping[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, own in self._group.items():
            if name != "params" and name in group:
                value = group[name]
                is_number = isinstance(own, torch.Tensor) and not isinstance(value, torch.Tensor)
                kept[name] = torch.tensor(value, dtype=own.dtype) if is_number else value
        return kept

    def initial(self) -> Scalars:
        names = [name for form in (self._plain, self._in_blocks) if form is not None for name in form.scalars()]
        return dict.fromkeys(names, 0.0)

    def present(self, scalars: Scalars) -> dict[str, Any]:
        """Return the step counts in the class's own form."""
        form = self._plain or self._in_blocks
        return {} if form is None else form.numbers(scalars)

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        self._group.update(self._kept(group))
        return _BlockStep(self, scalars)

    def tile(
        self, scalars: Scalars, master: torch.Tensor, gradient: torch.Tensor, slots: Sequence[torch.Tensor]
    ) -> None:
        """Update a tile of whole blocks, or one that ends with the parameter's last block."""
        in_blocks = any(slot.numel() != master.numel() or slot.dtype != torch.float32 for slot in slots)
        form = self._in_blocks if in_blocks else self._plain
        if form is None or len(form.arrays) != len(slots):
            raise UsageError(f"optimizer {self._kind.__name__} keeps other state than it did when it was made")
        proxy = self._proxy
        for first, stop in _pieces(master.numel(), form.block):
            views = {
                array.name: slot[first // array.block : -(-stop // array.block)]
                for array, slot in zip(form.arrays, slots, strict=True)
            }
            piece, proxy.grad = master[first:stop], None
            proxy.data = piece
            proxy.grad = gradient[first:stop]
            self._optimizer.state[proxy] = form.state(scalars, views)
            self._optimizer.step()
            after = self._optimizer.state.pop(proxy)
            if proxy.data.data_ptr() != piece.data_ptr():
                piece.copy_(proxy.data)
            for array in form.arrays:
                value = parts_of(after[array.entry])[array.part]
                if value is not views[array.name]:
                    views[array.name].copy_(value)


def _sizes() -> Iterator[int]:
    """Yield sizes to look for blocks at: no power of 2, so that a lookup table is not as long as there are blocks."""
    numel = 768
    while numel < _MOST_PROBED:
        yield numel
        numel *= 2


def _pieces(numel: int, block: int | None) -> Iterator[tuple[int, int]]:
    """Yield cuts of a tile: of whole blocks in few lengths, and the remainder of a last block."""
    first = 0
    if block is not None:
        for blocks in _PIECES:
            while numel - first >= blocks * block:
                yield first, first + blocks * block
                first += blocks * block
    if first < numel:
        yield first, numel


class _BlockStep:
    """A step of one parameter by a BlockKernel."""

    def __init__(self, kernel: BlockKernel, scalars: Scalars) -> None:
        self._kernel = kernel
        self._before = scalars

    def tile(self, master: torch.Tensor, gradient: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        self._kernel.tile(self._before, master, gradient, slots)

    def scalars(self) -> Scalars:
        return {name: value + 1 for name, value in self._before.items()}
