"""Arguments of the optimizers whose step needs a whole tensor."""

from typing import Annotated, Literal

from pydantic import Field

from ...config.keys import built
from ...config.optimizers import Betas, MomentParams, OptimizerParams
from ...config.values import Auto, BelowOne, Bool, Number, OneOf, Positive, Real, Words

EpsPair = Annotated[tuple[Real | None, Real], Words("two numbers of at least 0; null for the first is fp32's epsilon")]


class LambParams(MomentParams):
    """Arguments of LAMB: Adam whose step is scaled, for each tensor, by the norm of the weights over that of the update."""

    whole_tensors = True

    eps_inside_sqrt: Bool = built(False)
    """Add eps under the square root."""
    weight_decay: Real | Auto = built(0.0)
    """Decay of the weights, a part of the update before it is scaled."""
    bias_correction: Bool = built(True)
    """Correct the moments for starting at zero."""
    max_coeff: Real = built(10.0)
    """Largest factor of a tensor's step."""
    min_coeff: Real = built(0.01)
    """Smallest factor of a tensor's step."""


class AdafactorParams(OptimizerParams):
    """Arguments of Adafactor, as torch has them: of a matrix it keeps one number for each row and each column."""

    whole_tensors = True

    lr: Real | Auto = built(1e-2)
    """Learning rate; the default is torch's. The step is at most 1 / sqrt(steps), times the weights' root mean square."""
    beta2_decay: Annotated[Number, Field(le=0), Words("a number of at most 0")] = built(-0.8)
    """The second moment's decay is 1 - step to this power."""
    eps: EpsPair = built((None, 1e-3))
    """Least of the second moment, and least root mean square of the weights."""
    d: Annotated[Real, Field(ge=1), Words("a number of at least 1")] = built(1.0)
    """Updates with a larger root mean square are scaled down to it."""
    weight_decay: Real | Auto = built(0.0)
    """Decoupled decay of the weights per step, times lr."""
    maximize: Bool = built(False)
    """Ascend."""


class MuonParams(OptimizerParams):
    """Arguments of Muon for matrices, and of AdamW for embeddings, heads and parameters that are no matrices. A parameter's
    own attribute `use_muon` decides for it."""

    whole_tensors = True

    lr: Real | Auto | None = built(None)
    """Learning rate of both. Unset: 0.02 for Muon and 0.0003 for Adam, as DeepSpeed has it."""
    muon_lr: Real | None = built(None)
    """Learning rate of Muon, in place of lr."""
    adam_lr: Real | None = built(None)
    """Learning rate of Adam, in place of lr."""
    momentum: BelowOne = built(0.95)
    """Muon's momentum."""
    nesterov: Bool = built(True)
    """Nesterov's momentum, which DeepSpeed always uses."""
    ns_steps: Annotated[Positive, Field(le=99)] = built(5)
    """Newton-Schulz iterations."""
    adjust_lr_fn: Annotated[Literal["original", "match_rms_adamw"], OneOf()] = built("original")
    """How Muon's rate follows a matrix's shape: sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns))."""
    betas: Betas | Auto = built((0.9, 0.95))
    """Decay of Adam's moments."""
    eps: Real | Auto = built(1e-10)
    """Added to Adam's denominator."""
    weight_decay: Real | Auto = built(0.0)
    """Decoupled decay of the weights per step, times the rate, of both."""
