"""Config sections of the extras: arguments of optimizers whose step needs a whole tensor, of optimizers that send signs,
and the pattern of sparse attention. Does not import torch."""

from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..config.keys import Notice, Section, Status, option
from ..config.optimizers import Betas, MomentParams, OptimizerParams
from ..config.values import Auto, BelowOne, Bool, Count, Expects, Number, OneOf, Positive, Real

EpsPair = Annotated[
    tuple[Real | None, Real], Expects("two numbers of at least 0; null for the first is fp32's epsilon")
]


class LambParams(MomentParams):
    """Arguments of LAMB: Adam with each tensor's step scaled by the ratio of the weights' norm to the update's."""

    whole_tensors = True

    eps_inside_sqrt: Bool = option(False)
    """Add eps under the square root."""
    weight_decay: Real | Auto = option(0.0)
    """Weight decay, added to the update before it is scaled."""
    bias_correction: Bool = option(True)
    """Correct the moments for starting at zero."""
    max_coeff: Real = option(10.0)
    """Maximum factor by which a tensor's step is scaled."""
    min_coeff: Real = option(0.01)
    """Minimum factor by which a tensor's step is scaled."""


class AdafactorParams(OptimizerParams):
    """Arguments of Adafactor, as in torch: for a matrix it stores one number per row and column."""

    whole_tensors = True

    lr: Real | Auto = option(1e-2)
    """Learning rate; the default is torch's. The step is at most 1 / sqrt(steps), times the weights' root mean square."""
    beta2_decay: Annotated[Number, Field(le=0), Expects("a number of at most 0")] = option(-0.8)
    """The second moment's decay is 1 minus the step to this power."""
    eps: EpsPair = option((None, 1e-3))
    """Minimum of the second moment, and minimum root mean square of the weights."""
    d: Annotated[Real, Field(ge=1), Expects("a number of at least 1")] = option(1.0)
    """Updates with a larger root mean square are scaled down to it."""
    weight_decay: Real | Auto = option(0.0)
    """Decoupled weight decay per step, multiplied by lr."""
    maximize: Bool = option(False)
    """Maximize the loss instead of minimizing it."""


class MuonParams(OptimizerParams):
    """Arguments of Muon for matrices, and of AdamW for embeddings, heads and parameters that are not matrices. A parameter's
    attribute `use_muon` overrides this."""

    whole_tensors = True

    lr: Real | Auto | None = option(None)
    """Learning rate of Muon and Adam. Unset: 0.02 for Muon and 0.0003 for Adam, as in DeepSpeed."""
    muon_lr: Real | None = option(None)
    """Learning rate of Muon, instead of lr."""
    adam_lr: Real | None = option(None)
    """Learning rate of Adam, instead of lr."""
    momentum: BelowOne = option(0.95)
    """Muon's momentum."""
    nesterov: Bool = option(True)
    """Nesterov's momentum, which DeepSpeed always uses."""
    ns_steps: Annotated[Positive, Field(le=99)] = option(5)
    """Number of Newton-Schulz iterations."""
    adjust_lr_fn: Annotated[Literal["original", "match_rms_adamw"], OneOf()] = option("original")
    """How a matrix's shape scales Muon's rate: by sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns))."""
    betas: Betas | Auto = option((0.9, 0.95))
    """Decay rates of Adam's moments."""
    eps: Real | Auto = option(1e-10)
    """Added to Adam's denominator."""
    weight_decay: Real | Auto = option(0.0)
    """Decoupled weight decay per step, multiplied by the learning rate, for both."""


class _OneBitParams(MomentParams):
    """Arguments that the 1-bit optimizers share."""

    whole_tensors = True
    replicates_state = True
    exact: ClassVar[str] = "AdamW"
    """The equivalent optimizer that sends uncompressed gradients."""

    bias_correction: Bool = option(True)
    """Correct the moments for starting at zero, so that the warm-up matches the exact optimizer's; false: use them
    uncorrected, as DeepSpeed always does."""
    weight_decay: Real | Auto = option(0.0)
    """Decoupled weight decay per step, multiplied by lr."""

    @classmethod
    def conflicts(cls, settings: Any, kind: str) -> Iterator[Notice]:
        zero, clip = settings.zero_optimization, settings.gradient_clipping
        conflicting = {
            "zero_optimization.stage": zero.stage > 1,
            "zero_optimization.offload_optimizer": zero.offload_optimizer.device != "none",
            "gradient_clipping": "gradient_clipping" in settings.model_fields_set and clip not in {0.0, "auto"},
            "zstore.moments": settings.zstore.moments == "bf16",
            "bf16.bf16_optimizer_states": settings.bf16.bf16_optimizer_states,
            "optimizer.params.fp32_optimizer_states": not settings.optimizer.params.fp32_optimizer_states,
        }
        for key in (key for key, is_set in conflicting.items() if is_set):
            text = (
                f"every rank keeps all state of {kind} on the device in fp32, and its own gradients, which cannot be "
                f'clipped: remove {key} (stage 0 or 1), or set type "{cls.exact}" instead of {kind}'
            )
            yield Notice(Status.INVALID, text, (key, "optimizer.type"))


class OneBitAdamParams(_OneBitParams):
    """Arguments of 1-bit Adam, at stages 0 and 1: AdamW that sends its momentum as signs after a warm-up."""

    freeze_step: Positive = option(100000)
    """Number of AdamW updates; afterwards the variance is frozen, and signs are sent. Use 15 to 25% of the run, and at
    least the learning-rate warm-up; the default is DeepSpeed's."""


class ZeroOneAdamParams(_OneBitParams):
    """Arguments of 0/1 Adam, at stages 0 and 1: AdamW that sends signs from the start, and later not in every step."""

    var_freeze_step: Positive = option(100000)
    """Last update that may change the variance; afterwards ranks take local steps. The end of the learning-rate warm-up
    is a good choice; the default is DeepSpeed's."""
    var_update_scaler: Positive = option(16)
    """Number of variance updates after which their interval doubles; it starts at 1."""
    local_step_scaler: Positive = option(32678)
    """Number of updates after which the interval between exchanges doubles; it starts at 1."""
    local_step_clipper: Positive = option(16)
    """Maximum interval between exchanges, in updates; 1: ranks exchange in every update."""


class OneBitLambParams(_OneBitParams):
    """Arguments of 1-bit LAMB, at stages 0 and 1: LAMB that sends its momentum as signs after a warm-up."""

    exact = "Lamb"

    weight_decay: Real | Auto = option(0.0)
    """Weight decay, added to the update before it is scaled."""
    freeze_step: Positive = option(100000)
    """Number of LAMB updates; afterwards the variance is frozen, and signs are sent. The default is DeepSpeed's."""
    eps_inside_sqrt: Bool = option(False)
    """Add eps under the square root."""
    max_coeff: Real = option(10.0)
    """Maximum factor by which a tensor's step is scaled during the warm-up."""
    min_coeff: Real = option(0.01)
    """Minimum factor by which a tensor's step is scaled during the warm-up."""
    coeff_beta: BelowOne = option(0.9)
    """Decay rate of the average of the warm-up's factors, which later steps use; freeze_step should be well above 1 / (1 -
    coeff_beta)."""
    factor_max: Real = option(4.0)
    """Largest correction of that average."""
    factor_min: Real = option(0.5)
    """Smallest correction of that average."""
    factor_threshold: Real = option(0.1)
    """Fraction by which the correction may change per update."""


_Blocks = Annotated[tuple[Count, ...], Expects("a list of whole numbers")]
_Sizes = Annotated[tuple[Positive, ...], Expects("a list of whole numbers of at least 1")]

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "fixed": {
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "num_different_global_patterns": 1,
        "horizontal_global_attention": False,
    },
    "variable": {
        "num_random_blocks": 0,
        "local_window_blocks": (4,),
        "global_block_indices": (0,),
        "global_block_end_indices": None,
        "horizontal_global_attention": False,
    },
    "bigbird": {"num_random_blocks": 1, "num_sliding_window_blocks": 3, "num_global_blocks": 1},
    "bslongformer": {"num_sliding_window_blocks": 3, "global_block_indices": (0,), "global_block_end_indices": None},
}
"""The arguments of each mode, except the common ones, with DeepSpeed's defaults."""
_COMMON_ARGUMENTS = ("mode", "block", "attention", "different_layout_per_head")


class Pattern(Section):
    """Block-sparse attention: each token attends to part of the sequence. Applies to the models of `zstore train` and of
    transformers, and to any other model that calls `zstore.attention.attend`; see docs/models.md. An argument of a
    different mode raises an error."""

    mode: Annotated[Literal["dense", "fixed", "variable", "bigbird", "bslongformer"], OneOf()] = option("fixed")
    """Which blocks attend to which. "dense": all to all. "fixed": local windows and the last blocks of each window.
    "variable": windows of given sizes, random blocks and global blocks. "bigbird": a sliding window, random blocks and the
    first blocks. "bslongformer": a sliding window and global blocks."""
    block: Positive = option(16)
    """Tokens per block."""
    attention: Annotated[Literal["unidirectional", "bidirectional"], OneOf()] = option("bidirectional")
    """"unidirectional": tokens do not attend to later ones; causal models never do."""
    different_layout_per_head: Bool = option(False)
    """Give heads different layouts: different random blocks, or different global blocks with "fixed"."""
    num_local_blocks: Positive | None = option(None)
    """Blocks per window of "fixed". Unset: 4."""
    num_global_blocks: Count | None = option(None)
    """Number of global blocks: the last of each window of "fixed", the first of the sequence of "bigbird". Unset: 1."""
    num_different_global_patterns: Positive | None = option(None)
    """Number of different positions of the global blocks in a window of "fixed"; heads are divided among them. Unset: 1."""
    horizontal_global_attention: Bool | None = option(None)
    """Let global blocks of "fixed" and "variable" attend to all blocks too. Unset: false."""
    num_random_blocks: Count | None = option(None)
    """Number of random blocks that a block attends to, the same on every rank and in every run. Unset: 0 for "variable",
    1 for "bigbird"."""
    local_window_blocks: _Sizes | None = option(None)
    """Sizes of the windows of "variable" in blocks; the last size repeats. Unset: [4]."""
    num_sliding_window_blocks: Positive | None = option(None)
    """Width of the window of "bigbird" and "bslongformer" in blocks. Unset: 3."""
    global_block_indices: _Blocks | None = option(None)
    """Global blocks of "variable" and "bslongformer". Unset: [0]."""
    global_block_end_indices: _Blocks | None = option(None)
    """Ends of ranges of global blocks that start at `global_block_indices`. Unset: each range is one block."""

    @property
    def is_causal(self) -> bool:
        """Whether tokens never attend to later ones."""
        return self.attention == "unidirectional"

    def argument(self, name: str) -> Any:
        """Return an argument of the mode, or its default if it is not given."""
        value = getattr(self, name)
        return ARGUMENTS[self.mode][name] if value is None else value

    def prepare(self, model: Any) -> None:
        """Apply the pattern to the model's attention. Raises UsageError for an unsupported model."""
        resolve_name(f"{__package__}.sparse_attention:apply")(
            model, self
        )  # by name: it loads torch, and defines patterns

    def model_post_init(self, context: Any) -> None:
        """Raise ValueError for inconsistent arguments, from a config or a script's own pattern."""
        known = (*_COMMON_ARGUMENTS, *ARGUMENTS[self.mode])
        for name in self.model_fields_set.difference(known):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not an argument of mode {self.mode}; it has {', '.join(known[1:])}")
        if self.is_causal and self.horizontal_global_attention:
            raise ValueError(
                'horizontal_global_attention needs "attention": "bidirectional": global blocks would attend to later tokens'
            )
        if self.mode == "fixed":
            self._check_windows()
        starts, ends = self.global_block_indices or (0,), self.global_block_end_indices
        if ends is not None and (len(ends) != len(starts) or any(a >= b for a, b in zip(starts, ends, strict=True))):
            raise ValueError(
                f"global_block_end_indices: expected {len(starts)} ends, each after its start in global_block_indices, got "
                f"{list(ends)}"
            )

    def _check_windows(self) -> None:
        num_local, num_global, num_patterns = (self.argument(name) for name in list(ARGUMENTS["fixed"])[:3])
        if num_global < 1 or num_local % num_global:
            raise ValueError(f"num_local_blocks ({num_local}) must be a multiple of num_global_blocks ({num_global})")
        if num_patterns > num_local // num_global:
            raise ValueError(
                "num_different_global_patterns must be at most num_local_blocks / num_global_blocks = "
                f"{num_local // num_global}, got {num_patterns}"
            )
        if num_patterns > 1 and not self.different_layout_per_head:
            raise ValueError(f"num_different_global_patterns is {num_patterns}: set different_layout_per_head to true")
