"""Operations and parameters of a model's modules, counted while it runs."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from zstore.errors import UsageError

from ...report.operations import OperationCounter, Operations, is_compiled


class FlopsProfiler:
    """Profiles `model` from `start_profile` to `stop_profile`, by the names of DeepSpeed's class.

    Numbers stay until `end_profile`. The forwards in between count, and so do backwards on this thread, apart; see
    [Note: what counts] in `operations`. Modules are told apart by torch's `ModuleTracker`; for times by module there is
    torch.profiler. `recompute_fwd_factor` is how many forwards a backward repeats that was not seen.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.world_size = 1 if ds_engine is None else ds_engine.world_size
        self.micro_batch_size = None if ds_engine is None else ds_engine.train_micro_batch_size_per_gpu()
        self.recompute_fwd_factor = recompute_fwd_factor
        self._compiled = [name for name, module in model.named_modules() if is_compiled(module)]
        self._ignored: tuple[type[nn.Module], ...] = ()
        self._tracker = ModuleTracker()
        self._opened = ExitStack()
        self.started = False
        with OperationCounter():  # torch imports much at the first; that is no module's time
            torch.empty(0)
        self.reset_profile()

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Begin anew; modules of the classes in `ignore_list` are not reported: their operations count for their callers.
        Raises UsageError while a profile is under way."""
        if self.started:
            raise UsageError("start_profile(): a profile of this model is under way; call stop_profile() first")
        self.reset_profile()
        self.started, self._ignored = True, tuple(ignore_list or ())
        self._opened.enter_context(self._counting())
        self._opened.callback(self.model.register_forward_pre_hook(self._begin, prepend=True).remove)
        self._opened.callback(self.model.register_forward_hook(self._end, always_call=True).remove)

    def stop_profile(self) -> None:
        """Take no more; a second call does nothing."""
        self.started = False
        self._opened.close()

    def reset_profile(self) -> None:
        """Set all numbers to zero; a profile under way goes on."""
        self._counts: Counter[str] = Counter()
        self._modules: Counter[str] = Counter()
        self._seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        self._began_s = 0.0

    def end_profile(self) -> None:
        """Stop, and forget all numbers."""
        self.stop_profile()
        self.reset_profile()

    @contextmanager
    def around(self, part: str) -> Iterator[None]:
        """Count and time a "forward", a "backward" or a "step"."""
        began_s = time.perf_counter()
        with nullcontext() if part == "step" else self._counting():
            yield
            _wait()
        self._seconds[part] += time.perf_counter() - began_s

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with ExitStack() as opened:
            # The tracker's hooks would be compiled with a compiled module, and so compile it anew.
            if not self._compiled:
                opened.enter_context(self._tracker)
            opened.enter_context(OperationCounter(self._note))
            yield

    def _note(self, part: str, count: int) -> None:
        self._counts[part] += count
        if part == "forward":
            self._modules.update(dict.fromkeys(self._tracker.parents, count))

    def _begin(self, *_: Any) -> None:
        _wait()
        self._began_s = time.perf_counter()

    def _end(self, *_: Any) -> None:
        _wait()
        self._seconds["forward"] += time.perf_counter() - self._began_s

    @property
    def operations(self) -> Operations:
        """Floating-point operations so far; of a backward that was not seen the usual twice the forward is not added."""
        return Operations(**self._counts)

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the floating-point operations of the forwards, as a number or as text."""
        return _shown(self._counts["forward"], "FLOPS", as_string=as_string)

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-accumulates of the forwards, each of which is two operations."""
        return _shown(self._counts["forward"] // 2, "MACs", as_string=as_string)

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the forwards."""
        seconds = self._seconds["forward"]
        return f"{seconds * 1e3:.2f} ms" if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of parameters, of the whole model."""
        return _shown(sum(parameter.numel() for parameter in self.model.parameters()), "", as_string=as_string)

    def text(self, step: int, depth: int = -1, *, detailed: bool = True) -> str:
        """Return the report: the totals and, with `detailed`, each module down to `depth` (-1: all)."""
        seen, numel = self.operations, self.get_total_params()
        recomputed = seen.recomputed if seen.backward else int(self.recompute_fwd_factor * seen.forward)
        rows = {
            "world size": str(self.world_size),
            "micro-batch of a rank": str(self.micro_batch_size or ""),
            "parameters of the model": rate_text(numel, ""),
            "multiply-accumulates of the forward": rate_text(seen.forward // 2, "MACs"),
            "operations of the forward": rate_text(seen.forward, "FLOPs"),
            "operations of the backward": rate_text(seen.backward, "FLOPs") if seen.backward else "",
            "operations of repeated forwards": rate_text(recomputed, "FLOPs") if recomputed else "",
        }
        counts = {"forward": seen.forward, "backward": seen.backward + seen.recomputed, "step": 0}
        for part, seconds in self._seconds.items():
            if seconds:
                rows[f"latency of the {part}"] = f"{seconds * 1e3:.2f} ms"
                rows[f"rate of the {part}"] = rate_text(counts[part] / seconds, "FLOPS") if counts[part] else ""
        lines = [f"Profile of step {step}, one micro-batch of rank 0", ""]
        lines += [f"{name:<36} {text}" for name, text in rows.items() if text]
        if self._compiled:
            lines.append(
                f"Note: {', '.join(self._compiled[:3])}: compiled; modules within are not seen one by one, and of operations "
                "those that torch.compile leaves to libraries alone. Profile without engine.compile() to see all"
            )
        if detailed:
            lines += ["", "Each module: parameters, their share, multiply-accumulates of the forward, their share"]
            lines += self._module_lines("", type(self.model).__name__, self.model, depth)
        return "\n".join(lines)

    def _module_lines(self, name: str, path: str, module: nn.Module, depth: int) -> Iterator[str]:
        level = path.count(".")
        numel, forward = sum(parameter.numel() for parameter in module.parameters()), self._forward(path, module)
        numbers = (
            f"{rate_text(numel, '')}, {_share(numel, self.get_total_params())}, "
            f"{rate_text(forward // 2, 'MACs')}, {_share(forward, self._counts['forward'])}"
        )
        details = module.extra_repr()
        details = f", {details}" if details and "\n" not in details else ""
        yield f"{'  ' * level}{f'({name}): ' if name else ''}{type(module).__name__}({numbers}{details})"
        for child_name, child in module.named_children() if depth < 0 or level < depth else ():
            if not isinstance(child, self._ignored):
                yield from self._module_lines(child_name, f"{path}.{child_name}", child, depth)

    def _forward(self, path: str, module: nn.Module) -> int:
        """Return the operations of a module; of one that is never called itself, as a list of modules, its children's."""
        if module is self.model:
            return self._counts["forward"]
        found = self._modules[path]
        return found or sum(self._forward(f"{path}.{name}", child) for name, child in module.named_children())

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
    ) -> None:
        """Print the report, or write it to `output_file`; `top_modules` does not act."""
        write_text(self.text(profile_step, module_depth, detailed=detailed), output_file, print)


_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


def rate_text(number: float, unit: str) -> str:
    """Return a number in units of thousands, as "1.05 GFLOPS"."""
    for scale, prefix in _SCALES:
        if number >= scale:
            return f"{number / scale:.2f} {prefix}{unit}".rstrip()
    return f"{number:.0f} {unit}".rstrip()


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0.00 %"


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


def _wait() -> None:
    """Wait for a CUDA device in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


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
    numbers; the report is printed, or written to `output_file`, if `print_profile`.

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
