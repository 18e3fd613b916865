"""Model FLOPs utilisation: the operations that a step needs, as a share of the device's peak in its time.

[Note: utilisation]
MFU = operations of a step / (seconds of the step x peak of the device), on rank 0, as in Chowdhery et al., PaLM
(https://arxiv.org/abs/2204.02311), appendix B: forwards that are repeated to save memory do not count. The operations are
counted in the first micro-batch, forward and backward, once, and taken times the micro-batches of a step; of a backward that
the engine did not start (`loss.backward()`) they are twice the forward's. If the loop says how many tokens a step has, and
that changes, they change with it. Of a compiled model nothing is counted: they are 6 x parameters x tokens, if tokens are
known.

The peak is the maker's for dense products in the type of training, of GPUs in the table below. Of another device it is the
rate of matrix products as `plan.rates` measures it, of a CPU times torch's threads. That takes some 50 ms, so it is done at
once if metrics are requested, else once the run is old enough that it is a fiftieth of a percent of its time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..plan.rates import measure_rates
from .operations import CAN_LEAVE_COMPILED, OperationCounter, is_compiled

if TYPE_CHECKING:
    from ..training.training import Training

_log = logging.getLogger("zstore")

_PEAKS = (
    ("B200", {"16": 2250e12, "tf32": 1125e12, "fp32": 75e12}),
    ("H200", {"16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}),
    ("H100 PCIe", {"16": 756e12, "tf32": 378e12, "fp32": 51e12}),
    ("H100 NVL", {"16": 835e12, "tf32": 417e12, "fp32": 60e12}),
    ("H100", {"16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}),
    ("A100", {"16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    ("L40S", {"16": 362e12, "tf32": 183e12, "fp32": 91.6e12}),
    ("A10G", {"16": 70e12, "tf32": 35e12, "fp32": 31.2e12}),
)
"""Part of a CUDA device's name -> operations a second in dense products, from the makers' data sheets. The first that fits
counts."""

PATIENCE_S = 250.0
"""Age of a run at which measuring a device's rate no longer matters."""


@dataclass(kw_only=True)
class PhaseTimes:
    """Seconds spent in each phase.

    On a device that computes behind the host a phase is the host's time alone, but with `wall_clock_breakdown`.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Backward, with the reduction that goes along with it."""
    optimizer_s: float = 0.0
    """`step()` at the end of an accumulation: reduction, norm, update, gathering of parameters."""

    def __sub__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(
            forward_s=self.forward_s - other.forward_s,
            backward_s=self.backward_s - other.backward_s,
            optimizer_s=self.optimizer_s - other.optimizer_s,
        )


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak rate of a device."""

    flops: float
    """Floating-point operations a second."""
    source: str
    """"data sheet" or "measured"."""


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Model FLOPs utilisation of a run, as far as it is known. See [Note: utilisation]."""

    step_flops: int
    """Operations of a step on one rank, forwards that are repeated left out."""
    source: str
    """Source of `step_flops`: "counted", "forward counted" (the backward is twice that), "6 x parameters x tokens"."""
    peak_flops: float | None
    """Peak rate of the device, in operations a second; None: not measured yet."""
    peak_source: str | None
    """"data sheet" or "measured"."""
    mfu: float | None
    """Of the last step, 0 to 1; None: not known yet."""


def listed_peak(name: str, precision: str, *, tf32: bool) -> float | None:
    """Return the peak of the CUDA device called `name`; None for one that is not in the table."""
    kind = "16" if precision in {"bf16", "fp16"} else "tf32" if tf32 else "fp32"
    return next((peaks[kind] for part, peaks in _PEAKS if part in name), None)


def peak_of(device: torch.device, precision: str, *, measures: bool) -> Peak | None:
    """Return the peak of a device for training in `precision`; None if it would have to be measured and that is not allowed."""
    if device.type == "cuda":
        tf32 = torch.backends.cuda.matmul.allow_tf32
        listed = listed_peak(torch.cuda.get_device_name(device), precision, tf32=tf32)
        if listed is not None:
            return Peak(flops=listed, source="data sheet")
    if not measures:
        return None
    rate = measure_rates(device).of_device(precision)
    return Peak(flops=rate, source="measured") if rate else None


class StepUtilisation:
    """Knows the operations of a run's steps, and so its utilisation."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._micro: OperationCounter | None = None
        self._counted_tokens: int | None = None
        self._tokens: int | None = None
        self._peak: Peak | None = None
        self._peak_tried = False
        self.measures = False
        """Whether the device's rate may be measured at once."""
        self._age_s = 0.0
        self._ended_s: float | None = None
        self.last: float | None = None
        """Utilisation of the last step, 0 to 1; None: not known."""
        self._numel: int | None = None

    def counted(self, micro: OperationCounter) -> None:
        """Take the operations of the first micro-batch."""
        if micro.forward:
            self._micro, self._counted_tokens = micro, self._tokens

    def tokens(self, tokens: int | None) -> None:
        """Set the tokens of the step under way and of those to come, over all ranks."""
        if self._micro is not None and self._counted_tokens is None:
            self._counted_tokens = tokens
        self._tokens = tokens

    def step_ended(self) -> None:
        """Note that a step ended now, which began when the one before did; the first one, which warms up, does not count."""
        now_s, before_s = time.perf_counter(), self._ended_s
        self.last = None
        if before_s is not None:
            self._age_s += now_s - before_s
            self.last = self.of(now_s - before_s)
        elif self.measures:
            self._find_peak()
        self._ended_s = time.perf_counter()  # without the measurement

    def leave_out(self, seconds: float) -> None:
        """Let so many seconds before now be no part of the step under way."""
        if self._ended_s is not None:
            self._ended_s += seconds

    def begin_anew(self) -> None:
        """Forget when the last step ended: the time since then is no part of the next."""
        self._ended_s = None

    def of(self, step_s: float) -> float | None:
        """Return the utilisation of a step that took so long, by the loop's own clock."""
        flops, peak = self.step_flops(), self._find_peak()
        return None if flops is None or peak is None or step_s <= 0 else flops[0] / (step_s * peak.flops)

    def _find_peak(self) -> Peak | None:
        measures = self.measures or self._age_s > PATIENCE_S
        if self._peak is None and (measures or not self._peak_tried):
            self._peak_tried = True
            training = self._training
            try:
                self._peak = peak_of(training.world.device, training.config.precision, measures=measures)
            except RuntimeError as error:  # no reason to stop a run
                _log.warning("the device's rate cannot be measured, so that there is no utilisation: %s", error)
                self.measures, self._age_s = False, float("-inf")
        return self._peak

    def step_flops(self) -> tuple[int, str] | None:
        """Return the operations of a step on one rank, and their source."""
        training = self._training
        if self._micro is not None:
            micro, source = self._micro, "counted"
            flops = micro.forward + micro.backward
            if not micro.backward:
                flops, source = 3 * micro.forward, "forward counted"
            flops *= training.accumulation.batch.accumulation_steps
            if self._tokens and self._counted_tokens:
                flops = flops * self._tokens // self._counted_tokens
            return flops, source
        if self._tokens:
            if self._numel is None:
                self._numel = sum(record.numel for record in training.state.records)
            return 6 * self._numel * self._tokens // training.world.world_size, "6 x parameters x tokens"
        return None

    def now(self) -> Utilisation | None:
        """Return the known numbers; None if not even operations are."""
        flops = self.step_flops()
        if flops is None:
            return None
        peak = self._find_peak()
        return Utilisation(
            step_flops=flops[0],
            source=flops[1],
            peak_flops=None if peak is None else peak.flops,
            peak_source=None if peak is None else peak.source,
            mfu=self.last,
        )


class ComputationWatch:
    """Wraps each forward, backward and update of an engine until its operations are counted; then `is_done`.

    Nothing is counted without gradients, nor on other ranks than 0. See [Note: utilisation].
    """

    def __init__(self, training: Training, utilisation: StepUtilisation) -> None:
        self._training = training
        self.utilisation = utilisation
        self._counter: OperationCounter | None = None
        self.is_done = training.world.rank != 0 or training.config.frozen or not CAN_LEAVE_COMPILED

    @contextmanager
    def around(self, phase: str, timed: AbstractContextManager[None]) -> Iterator[None]:
        """Wrap a phase, as `PhaseTimes` names it, which `timed` wraps too."""
        if phase == "forward_s" and torch.is_grad_enabled():
            if not self._training.accumulation.is_new:
                self._end()  # after a backward that the engine did not start
            self._begin()
        with nullcontext() if self._counter is None or phase == "optimizer_s" else self._counter, timed:
            yield
        if phase == "backward_s":
            self._end()

    def _begin(self) -> None:
        if not self.is_done and self._counter is None:
            training = self._training
            self.is_done = training.compiled is not None or any(map(is_compiled, training.model.modules()))
            self._counter = None if self.is_done else OperationCounter()

    def _end(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            self.is_done = True
            self.utilisation.counted(counter)

    def step_ended(self) -> None:
        """Note that an optimizer step ended, perhaps after a backward that the engine did not start."""
        self._end()
