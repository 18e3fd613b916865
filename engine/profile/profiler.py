"""Operations, parameters and latency of a model's modules, measured while it runs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zstore.errors import UsageError

from .operations import OperationCounter, Operations
from .report import ModelProfile, ModuleProfile, profile_text, rate_text, summary_text

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@dataclass(kw_only=True)
class _Measured:
    """One module's share."""

    forward: int = 0
    forward_s: float = 0.0
    began_s: list[float] = field(default_factory=list)


class FlopsProfiler:
    """Profiles `model` from `start_profile` to `stop_profile`, by the names of DeepSpeed's class.

    Numbers stay until `end_profile`. The forwards in between count, and so do backwards on this thread, apart; see
    [Note: what counts] in `operations`. On a CUDA device each module's forward is waited for, so that latencies are true.
    Parameters count in their true shapes, sharded or not. `recompute_fwd_factor` is how many forwards a backward repeats
    that was not seen.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.world_size = 1 if ds_engine is None else ds_engine.world_size
        self.micro_batch_size = None if ds_engine is None else ds_engine.train_micro_batch_size_per_gpu()
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._hooks: list[RemovableHandle] = []
        with OperationCounter():  # torch imports much at the first; that is no module's time
            torch.empty(0)
        self._reset()

    def _reset(self) -> None:
        self._measured: dict[nn.Module, _Measured] = {}
        self._inside: list[nn.Module] = []
        self._counter = OperationCounter(self._note)
        self._seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}

    # -- measuring --------------------------------------------------------------------------------------------------

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Begin anew; modules of the classes in `ignore_list` are not entered: their operations are those of what calls
        them. Raises UsageError while a profile is under way."""
        if self.started:
            raise UsageError("start_profile(): a profile of this model is under way; call stop_profile() first")
        self._reset()
        self.watch_modules(tuple(ignore_list or ()))
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def watch_modules(self, ignored: tuple[type[nn.Module], ...] = ()) -> None:
        """Take the modules' times; operations count within `counting` blocks."""
        self.started = True
        # What is compiled has its hooks compiled with it: another hook would compile it anew.
        compiled = {inner for outer in self.model.modules() if is_compiled(outer) for inner in outer.modules()}
        for module in self.model.modules():
            if module not in compiled and (not isinstance(module, ignored) or module is self.model):
                self._hooks.append(module.register_forward_pre_hook(self._entered, prepend=True))
                self._hooks.append(module.register_forward_hook(self._left, always_call=True))

    def counting(self) -> OperationCounter:
        """Return what counts in a `with` block, between `watch_modules` and `stop_watching`."""
        return self._counter

    def stop_profile(self) -> None:
        """Take no more; a second call does nothing."""
        if self.started:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.stop_watching()

    def stop_watching(self) -> None:
        """Take no more of the modules."""
        self.started = False
        while self._hooks:
            self._hooks.pop().remove()

    def reset_profile(self) -> None:
        """Set all numbers to zero; what is under way goes on."""
        counter, started = self._counter, self.started
        self._reset()
        if started:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def end_profile(self) -> None:
        """Stop, and forget all numbers."""
        self.stop_profile()
        self._reset()

    def add_seconds(self, part: str, seconds: float) -> None:
        """Say how long a "forward", a "backward" or a "step" took."""
        self._seconds[part] += seconds

    def _note(self, part: str, count: int) -> None:
        if part == "forward":
            for module in dict.fromkeys(self._inside):
                self._measured[module].forward += count

    def _entered(self, module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1 and not torch.compiler.is_compiling():
            self._inside.append(module)
            measured = self._measured.setdefault(module, _Measured())
            self.wait()
            measured.began_s.append(time.perf_counter())

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside and self._inside[-1] is module and torch._C._current_graph_task_id() == -1:
            self.wait()
            measured = self._measured[module]
            measured.forward_s += time.perf_counter() - measured.began_s.pop()
            self._inside.pop()

    def wait(self) -> None:
        """Wait for a CUDA device in use."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def operations(self) -> Operations:
        """Floating-point operations so far; of a backward that was not seen the usual twice the forward is not added."""
        return self._counter.counted

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the floating-point operations of the forwards, as a number or as text."""
        return _shown(self._counter.counted.forward, "FLOPS", as_string=as_string)

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-accumulates of the forwards, each of which is two operations."""
        return _shown(self._counter.counted.forward // 2, "MACs", as_string=as_string)

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the forwards."""
        seconds = self._forward_s()
        return f"{seconds * 1e3:.2f} ms" if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of parameters, of the whole model."""
        return _shown(sum(parameter.numel() for parameter in self.model.parameters()), "", as_string=as_string)

    def _forward_s(self) -> float:
        found = self._measured.get(self.model)
        return self._seconds["forward"] or (0.0 if found is None else found.forward_s)

    def profile(self, profile_step: int = 1) -> ModelProfile:
        """Return everything as data."""
        return ModelProfile(
            step=profile_step,
            world_size=self.world_size,
            micro_batch_size=self.micro_batch_size,
            operations=self.operations,
            repeated_forwards=self.recompute_fwd_factor,
            forward_s=self._forward_s(),
            backward_s=self._seconds["backward"],
            step_s=self._seconds["step"],
            root=self._tree(type(self.model).__name__, self.model, set()),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterable[str]:
        unseen = [name for name, module in self.model.named_modules() if is_compiled(module)]
        if unseen:
            names = ", ".join(name or type(self.model).__name__ for name in unseen[:3])
            yield (
                f"{names}{' and others' if len(unseen) > 3 else ''}: compiled; modules within are not seen one by one, and of "
                "operations those that torch.compile leaves to libraries alone. Profile without engine.compile() to see all"
            )

    def _tree(self, name: str, module: nn.Module, seen: set[nn.Module]) -> ModuleProfile:
        seen.add(module)
        children = tuple(
            self._tree(child_name, child, seen) for child_name, child in module.named_children() if child not in seen
        )
        measured = self._measured.get(module, _Measured())
        forward, forward_s = measured.forward, measured.forward_s
        if module not in self._measured:  # a list of modules, which itself is never called
            forward, forward_s = sum(one.forward for one in children), sum(one.forward_s for one in children)
        if module is self.model:
            forward, forward_s = self._counter.counted.forward, self._forward_s()
        return ModuleProfile(
            name=name,
            kind=type(module).__name__,
            details=module.extra_repr(),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            forward=forward,
            forward_s=forward_s,
            children=children,
        )

    # -- text -------------------------------------------------------------------------------------------------------

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
    ) -> None:
        """Print the report, or write it to `output_file`."""
        text = profile_text(self.profile(profile_step), depth=module_depth, top=top_modules, detailed=detailed)
        write_text(text, output_file, print)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes of modules that have most parameters, operations and latency, by depth."""
        print(summary_text(self.profile().root, depth=module_depth, top=top_modules))  # noqa: T201


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's call is compiled."""
    return getattr(module, "_compiled_call_impl", None) is not None


def write_text(text: str, output_file: str | Path | None, say: Callable[[str], None]) -> None:
    """Write a report to a file, whose folder is made, or hand it to `say`. Raises UsageError for a file that cannot be
    written."""
    if output_file is None:
        say(text)
        return
    path = Path(output_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the profile cannot be written to {path}: {error}") from error


def _shown(number: float, unit: str, *, as_string: bool) -> Any:
    return rate_text(number, unit) if as_string else number


def get_model_profile(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Iterable[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return (operations, multiply-accumulates, parameters) of a forward of `model`, as text or with `as_string=False` as
    numbers; the report is printed, or written to `output_file`, where `print_profile`.

    The model is called with `args` and `kwargs`, or with ones of `input_shape` of the type and on the device of its first
    parameter; `mode` "generate" calls its `generate`. It runs without gradients, in the mode that it is in, `warm_up` times
    before. Raises UsageError for neither or both kinds of arguments, and for another mode.
    """
    call = _call_of(model, input_shape, tuple(args), kwargs or {}, mode)
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            call()
        profiler.start_profile(ignore_modules)
        try:
            call()
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    found = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    profiler.end_profile()
    return found


def _call_of(
    model: nn.Module, shape: tuple[int, ...] | None, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str
) -> Callable[[], Any]:
    if mode not in {"forward", "generate"}:
        raise UsageError(f'get_model_profile(mode={mode!r}): expected "forward" or "generate"')
    if not isinstance(model, nn.Module):
        raise UsageError(f"get_model_profile(): expected a torch.nn.Module, got {type(model).__name__}")
    if (shape is None) == (not args and not kwargs):
        raise UsageError("get_model_profile(): pass input_shape=(...), or args=[...] and kwargs={...}: one of the two")
    if shape is not None:
        if not shape or any(type(extent) is not int or extent < 1 for extent in shape):
            raise UsageError(f"get_model_profile(input_shape={shape!r}): expected extents of at least 1")
        first = next(model.parameters(), None)
        like: dict[str, Any] = {} if first is None else {"dtype": first.dtype, "device": first.device}
        args = (torch.ones(shape, **like),)
    function: Any = model if mode == "forward" else model.generate
    return functools.partial(function, *args, **kwargs)
