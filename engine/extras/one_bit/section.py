"""Arguments of the optimizers that send signs, and the settings that these cannot be combined with."""

from collections.abc import Iterator
from typing import Any, ClassVar

from ...config.keys import Notice, Status, built
from ...config.optimizers import MomentParams
from ...config.values import Auto, BelowOne, Bool, Positive, Real


class _OneBitParams(MomentParams):
    """Arguments that the 1-bit optimizers share."""

    whole_tensors = True
    keeps_whole = True
    exact: ClassVar[str] = "AdamW"
    """The optimizer that sends gradients."""

    bias_correction: Bool = built(True)
    """Correct the moments for starting at zero, so that the warm-up is that of the exact optimizer; false: use them as
    they are, which DeepSpeed does whatever this says."""
    weight_decay: Real | Auto = built(0.0)
    """Decoupled decay of the weights per step, times lr."""

    @classmethod
    def conflicts(cls, settings: Any, kind: str) -> Iterator[Notice]:
        zero, clip = settings.zero_optimization, settings.gradient_clipping
        asked = {
            "zero_optimization.stage": zero.stage > 1,
            "zero_optimization.offload_optimizer": zero.offload_optimizer.device != "none",
            "gradient_clipping": "gradient_clipping" in settings.model_fields_set and clip not in {0.0, "auto"},
            "zstore.moments": settings.zstore.moments == "bf16",
            "bf16.bf16_optimizer_states": settings.bf16.bf16_optimizer_states,
            "optimizer.params.fp32_optimizer_states": not settings.optimizer.params.fp32_optimizer_states,
        }
        for key in (key for key, is_asked in asked.items() if is_asked):
            text = (
                f"every rank keeps all state of {kind} on the device in fp32, and its own gradients, which no norm "
                f'clips: leave {key} out (stage 0 or 1), or write type "{cls.exact}" in place of {kind}'
            )
            yield Notice(Status.WRONG, text, (key, "optimizer.type"))


class OneBitAdamParams(_OneBitParams):
    """Arguments of 1-bit Adam, at stages 0 and 1: AdamW that sends its momentum as signs after a warm-up."""

    freeze_step: Positive = built(100000)
    """Updates that are AdamW's; in later ones the variance stays, and signs are sent. Take 15 to 25% of the run, and not
    less than the warm-up of the rate; the default is DeepSpeed's."""


class ZeroOneAdamParams(_OneBitParams):
    """Arguments of 0/1 Adam, at stages 0 and 1: AdamW that sends signs from the start, and later not in every step."""

    var_freeze_step: Positive = built(100000)
    """Last update that may change the variance; after it ranks take steps of their own. The end of the warm-up of the rate
    is a good one; the default is DeepSpeed's."""
    var_update_scaler: Positive = built(16)
    """Updates of the variance after which their interval doubles; it starts at 1."""
    local_step_scaler: Positive = built(32678)
    """Updates after which the interval between exchanges doubles; it starts at 1."""
    local_step_clipper: Positive = built(16)
    """Longest interval between exchanges, in updates; 1: ranks exchange in every one."""


class OneBitLambParams(_OneBitParams):
    """Arguments of 1-bit LAMB, at stages 0 and 1: LAMB that sends its momentum as signs after a warm-up."""

    exact = "Lamb"

    weight_decay: Real | Auto = built(0.0)
    """Decay of the weights, a part of the update before it is scaled."""
    freeze_step: Positive = built(100000)
    """Updates that are LAMB's; in later ones the variance stays, and signs are sent. The default is DeepSpeed's."""
    eps_inside_sqrt: Bool = built(False)
    """Add eps under the square root."""
    max_coeff: Real = built(10.0)
    """Largest factor of a tensor's step in the warm-up."""
    min_coeff: Real = built(0.01)
    """Smallest factor of a tensor's step in the warm-up."""
    coeff_beta: BelowOne = built(0.9)
    """Decay of the average of the warm-up's factors, which later steps take; freeze_step should be well above 1 / (1 -
    coeff_beta)."""
    factor_max: Real = built(4.0)
    """Largest correction of that average."""
    factor_min: Real = built(0.5)
    """Smallest correction of that average."""
    factor_threshold: Real = built(0.1)
    """Part by which the correction may change in an update."""
