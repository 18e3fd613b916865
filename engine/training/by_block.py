"""Accumulation block by block: each block of the model runs for all micro-batches of a step before the next block does, so
that its parameters are brought once a step and direction, and not once for each micro-batch.

[Note: accumulation by block]
A forward of each micro-batch runs in a thread of its own, one at a time: at every block it waits until the others came
there. The tensors that go into a block are cut from their graph there (leaves in their place), and the backward takes
the pieces between the cuts from the last to the first, each for all micro-batches in their order: the piece before a leaf
begins with the leaf's gradient. So every operation has the operands that it has in the usual order, and a
parameter's gradients are reduced and added up in the order of micro-batches: the bits are the same.

Random numbers cannot be those of the usual order, in which a micro-batch goes on where the one before ended. Each
micro-batch has a random state of its own, seeded by a number that is drawn from torch's generator for it.

A parameter of several pieces, like an embedding that is the output head too, has one gradient a micro-batch. Those of its
later pieces are kept until its first piece has had its backward. A tensor that goes past a block, from one piece
to another, would tie the backwards of pieces together, and is an error.

The order is that of GreedySnake, which has it for a model of its own; here it is for any whose blocks are in ModuleLists.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zstore.errors import UsageError

from ..activations.blocks import find_blocks
from ..params.record import ParameterRecord
from ..zero.gradients import agree_any
from ..zero.unit_gradients import UnitGradients
from .training import Training

Tensors = list[torch.Tensor]


class _NoTurn(BaseException):
    """Raised in a thread that waits for its turn, if another one failed."""


class _Turns:
    """Threads of which one runs at a time, round by round in their order."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._waiting = list(range(count))
        """Those that are not done, the one whose turn it is first."""
        self.error: BaseException | None = None

    def wait(self, number: int) -> None:
        """Wait until it is the turn of thread `number`. Raises _NoTurn if another one failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._waiting[0] == number)
        if self.error is not None:
            raise _NoTurn

    def pass_on(self, *, done: bool = False) -> None:
        """End the turn of the thread that runs; one that is `done` gets no other."""
        with self._changed:
            number = self._waiting.pop(0)
            self._waiting += [] if done else [number]
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let all threads end, because of `error`."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


@dataclass
class _GraphPiece:
    """The part of a micro-batch's graph between two cuts."""

    roots: Tensors
    """Tensors from which its backward starts: those that were cut at its end, or the loss."""
    ends: Tensors
    """The leaves in their place, whose gradients its backward starts with; empty for the loss."""
    parameters: dict[nn.Parameter, None]

    def backward(self) -> None:
        """Bring gradients to the parameters and to the leaves at the beginning of the piece."""
        if not self.ends:
            torch.autograd.backward(self.roots)
            return
        came = [(root, end.grad) for root, end in zip(self.roots, self.ends, strict=True) if end.grad is not None]
        if came:
            torch.autograd.backward([root for root, _ in came], [gradient for _, gradient in came])


class MicroBatch:
    """The forward of a micro-batch, cut into pieces."""

    def __init__(self) -> None:
        self.pieces: list[_GraphPiece] = []
        self.loss = torch.empty(())
        self._leaves: dict[int, torch.Tensor] = {}
        """All leaves, by their ids."""
        self._begins: set[int] = set()
        """Ids of those that the last cut made."""
        self._latest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the id of a tensor that was cut: it, and the last leaf in its place."""
        self._nodes: set[Any] = set()
        """Nodes of the pieces so far."""

    def cut(self, name: str, values: Any) -> Any:
        """Return `values`, the inputs of block `name`, with leaves in place of tensors that have a graph."""
        new: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

        def of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            if id(value) not in new:
                _, root = self._latest.get(id(value), (value, value))
                if root.grad_fn is None and id(root) not in self._leaves:
                    return value  # a parameter
                new[id(value)] = value, root, root.detach().requires_grad_()
            return new[id(value)][2]

        values = tree_map(of, values)
        self._add(name, [root for _, root, _ in new.values()], [leaf for _, _, leaf in new.values()])
        for value, _, leaf in new.values():
            self._latest[id(value)] = value, leaf
            self._leaves[id(leaf)] = leaf
        self._begins = {id(leaf) for _, _, leaf in new.values()}
        return values

    def end(self, loss: torch.Tensor) -> None:
        """Take the last piece, whose backward begins at `loss`, as it is scaled."""
        self._add("the loss", [loss], [])
        self._leaves.clear()
        self._latest.clear()
        self._nodes.clear()

    def _add(self, name: str, roots: Tensors, ends: Tensors) -> None:
        """Note a piece. Raises UsageError if its graph reaches into a piece before the last."""
        parameters: dict[nn.Parameter, None] = {}
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            variable = getattr(node, "variable", None)
            if isinstance(variable, nn.Parameter):
                parameters[variable] = None
            elif node in self._nodes or (id(variable) in self._leaves and id(variable) not in self._begins):
                raise UsageError(
                    f'"accumulation_order": "block": {name} uses a tensor that went past the block ahead of it, so that blocks '
                    "have no backward of their own: hand it to each block as an argument, or set "
                    '"accumulation_order" to "micro_batch"'
                )
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)
        self._nodes |= seen
        self.pieces.append(_GraphPiece(roots, ends, parameters))


def gradients_by_block(training: Training) -> UnitGradients | None:
    """Return the gradients if `train_batch` takes the next step block by block: not the first of a run, which shows what comes;
    None if it goes in the usual order."""
    several = training.accumulation.batch.accumulation_steps > 1 and training.accumulation.named is None
    if not (training.config.accumulates_by_block and training.hooks is not None and several):
        return None
    gradients = training.gradients
    return gradients if isinstance(gradients, UnitGradients) and gradients.arrivals.order_is_agreed else None


class AccumulationByBlock:
    """Forwards and backwards of all micro-batches of a step. See [Note: accumulation by block].

    `gradients` had a backward in the usual order, which showed what comes.
    """

    def __init__(self, training: Training, gradients: UnitGradients) -> None:
        self._training = training
        self._gradients = gradients
        self._records = {record.parameter: record for record in training.trained}
        self._names = {module: name for name, module in training.model.named_modules()}
        self._current: tuple[_Turns, int, MicroBatch] | None = None
        """The forward whose turn it is; None outside of forwards."""
        self._of_piece: dict[int, dict[ParameterRecord, None]] = {}
        """Records whose gradients each piece brought on any rank."""
        self._expected: set[ParameterRecord] = set()
        """Those that were expected then."""
        self._blocks = find_blocks(training.model)
        if len(self._blocks) < 2:
            raise UsageError(
                '"accumulation_order": "block" takes the blocks of the model one by one, and it has no two modules with '
                'parameters in a ModuleList: set it to "micro_batch"'
            )

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        loss_of: Callable[[Any], torch.Tensor],
        batches: Sequence[Any],
        around: Callable[[], AbstractContextManager[None]],
    ) -> list[MicroBatch]:
        """Run `loss_of` each of the inputs, in a thread and within `around()`; return the losses and graphs.

        Raises what one of them raised, and UsageError if the model's blocks cannot be taken one by one.
        """
        turns, made = _Turns(len(batches)), [MicroBatch() for _ in batches]
        seeds = torch.randint(2**62, (len(batches),)).tolist()
        device = self._training.world.device

        def run(number: int, state: list[contextlib.AbstractContextManager[Any]]) -> None:
            try:
                turns.wait(number)
                with contextlib.ExitStack() as stack:
                    for each in (*state, around()):
                        stack.enter_context(each)
                    if device.type == "cuda":
                        torch.cuda.set_device(device)
                    torch.manual_seed(seeds[number])
                    self._current = turns, number, made[number]
                    made[number].loss = loss_of(batches[number])
                turns.pass_on(done=True)
            except _NoTurn:
                pass
            except BaseException as error:
                turns.fail(error)

        before, after = (torch.compiler.disable(hook) for hook in (self._before, self._after))  # type: ignore[no-untyped-call]
        # Ahead of the hooks that gather parameters, and behind them.
        handles = [block.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for block in self._blocks]
        handles.append(self._blocks[-1].register_forward_hook(after))
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(run, number, _autocast()), daemon=True)
            for number in range(len(batches))
        ]
        with self._own_random_state():
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except BaseException as error:  # Ctrl-C
                turns.fail(error)
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                raise
            finally:
                for handle in handles:
                    handle.remove()
                self._current = None
        if turns.error is not None:
            raise turns.error
        return made

    def _own_random_state(self) -> AbstractContextManager[None]:
        """Let random numbers go on after the block as if it had drawn none."""
        device = self._training.world.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])

    def _before(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._cut(block, f"block {self._names[block]!r}", (args, kwargs))

    def _after(self, block: nn.Module, args: Any, output: Any) -> Any:
        return self._cut(block, f"what follows block {self._names[block]!r}", output)

    def _cut(self, block: nn.Module, name: str, values: Any) -> Any:
        """Let the other micro-batches come to this point; then cut the one that did."""
        if self._current is None:
            return None
        if not torch.is_grad_enabled():
            raise UsageError(
                f'"accumulation_order": "block": block {self._names[block]!r} runs without gradients, as reentrant '
                'checkpointing lets it: checkpoint with use_reentrant=False, or "zstore": {"gradient_checkpointing": true}'
            )
        turns, number, batch = self._current
        with self._own_random_state():
            turns.pass_on()
            turns.wait(number)
        self._current = turns, number, batch
        return batch.cut(name, values)

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, batches: Sequence[MicroBatch]) -> None:
        """Accumulate the gradients of the micro-batches, as the backwards of one step do (all ranks)."""
        for batch in batches:
            batch.end(self._training.scaled(batch.loss))
        if len({len(batch.pieces) for batch in batches}) > 1:
            raise UsageError(
                '"accumulation_order": "block": micro-batches of a step ran through different numbers of blocks: a model that '
                'leaves blocks out needs "accumulation_order": "micro_batch"'
            )
        training = self._training
        # All but one are over: the backward of the last one brings the gradients of all.
        training.accumulation.stepped = len(batches) - 1
        training.counters.micro_steps += len(batches) - 1
        training.begin_backward()
        try:
            self._gradients.waits = True
            self._take_pieces(batches)
        except BaseException as raised:
            training.abandon_backward(raised)
            raise
        finally:
            self._gradients.waits = False
        training.end_backward()

    def _take_pieces(self, batches: Sequence[MicroBatch]) -> None:
        first: dict[nn.Parameter, int] = {}
        for number, piece in enumerate(batches[0].pieces):
            for parameter in piece.parameters:
                first.setdefault(parameter, number)
        kept: list[dict[nn.Parameter, torch.Tensor]] = [{} for _ in batches]
        expected = set(self._gradients.expected)
        if self._expected != expected:
            self._of_piece.clear()  # the step before brought others than the one in which they were agreed on
            self._expected = expected
        for number in reversed(range(len(batches[0].pieces))):
            for micro_batch, batch in enumerate(batches):
                piece = batch.pieces.pop()
                self._gradients.begin_part(micro_batch, last=micro_batch == len(batches) - 1)
                for parameter in piece.parameters.keys() & kept[micro_batch].keys():
                    parameter.grad = kept[micro_batch].pop(parameter)
                piece.backward()
                came = list[ParameterRecord]()
                for parameter in piece.parameters:
                    if parameter.grad is None or parameter not in self._records:
                        continue
                    if first.get(parameter, number) < number:
                        kept[micro_batch][parameter], parameter.grad = parameter.grad, None
                    else:
                        came.append(self._records[parameter])
                self._gradients.send(self._agreed(number, came))
        self._gradients.drain()
        self._gradients.arrivals.end_parts(len(batches))

    def _agreed(self, number: int, came: list[ParameterRecord]) -> list[ParameterRecord]:
        """Return the records whose gradients piece `number` brings on any rank, in one order (all ranks)."""
        world = self._training.world
        if world.world_size == 1:
            return came
        if number not in self._of_piece:
            records, mine = list(self._records.values()), set(came)
            any_ = agree_any(world, [record in mine for record in records])
            self._of_piece[number] = dict.fromkeys(
                record for record, is_any in zip(records, any_, strict=True) if is_any
            )
        return list(self._of_piece[number])


def _autocast() -> list[AbstractContextManager[Any]]:
    """Return contexts that give another thread this one's autocast."""
    return [
        torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))
        for device in ("cpu", "cuda")
    ]
