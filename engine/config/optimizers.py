"""The section `optimizer`: optimizers that a config may name, and their arguments."""

from typing import Annotated, Literal

from .keys import Section, built, no_effect, not_built, refused
from .optimizer_names import advice_on
from .sections import FP32, KERNEL
from .values import Anything, Auto, BelowOne, Bool, OneOf, Real, Words

_CLIENT = "pass an optimizer that does it to initialize(optimizer=...)"
_OTHER = "it belongs to another optimizer and has no meaning for Adam; remove it"

Betas = Annotated[tuple[BelowOne, BelowOne], Words("two numbers, each from 0 to below 1")]


class OptimizerParams(Section):
    """Arguments of Adam and AdamW."""

    lr: Real | Auto = built(1e-3)
    """Learning rate; the default is torch's and DeepSpeed's."""
    betas: Betas | Auto = built((0.9, 0.999))
    """Decay of the two moments, each below 1."""
    eps: Real | Auto = built(1e-8)
    """Added to the denominator."""
    weight_decay: Real | Auto | None = built(None)
    """Decay of the weights per step, times lr. Unset: 0, but 0.01 for AdamW with torch_adam, as torch has it."""
    adam_w_mode: Bool = built(True)
    """Decoupled weight decay (AdamW) for type Adam too; false: weight decay as a part of the gradient."""
    torch_adam: Bool = built(False)
    """torch's own Adam. The update is torch's in any case; this only chooses the default of weight_decay."""
    bias_correction: Bool = refused(True, f"the moments are always bias-corrected; {_CLIENT}")
    """Correct the moments for starting at zero."""
    amsgrad: Bool = refused(False, _CLIENT)
    """Use the largest second moment seen."""
    maximize: Bool = refused(False, _CLIENT)
    """Ascend."""
    max_grad_norm: Real = refused(0.0, "set gradient_clipping at the top of the config instead")
    """Clipping inside the optimizer."""
    fused: Bool = no_effect(True, KERNEL)
    """torch's choice of kernel."""
    foreach: Bool = no_effect(False, KERNEL)
    """torch's choice of kernel."""
    capturable: Bool = no_effect(False, KERNEL)
    """For CUDA graphs."""
    differentiable: Bool = refused(
        False, "no gradient passes through the engine's step; write that loop in plain torch"
    )
    """Differentiate through the step."""
    set_grad_none: Bool = no_effect(True, "the engine owns the gradients")
    """How gradients are cleared."""
    fp32_optimizer_states: Bool = not_built(True, FP32)
    """Keep moments in fp32."""
    freeze_step: Anything = no_effect(None, _OTHER)
    """Warm-up steps of 1-bit Adam."""
    var_freeze_step: Anything = no_effect(None, _OTHER)
    """Of 0/1 Adam."""
    var_update_scaler: Anything = no_effect(None, _OTHER)
    """Of 0/1 Adam."""
    local_step_scaler: Anything = no_effect(None, _OTHER)
    """Of 0/1 Adam."""
    local_step_clipper: Anything = no_effect(None, _OTHER)
    """Of 0/1 Adam."""
    cuda_aware: Anything = no_effect(None, _OTHER)
    """MPI of 1-bit Adam."""
    comm_backend_name: Anything = no_effect(None, _OTHER)
    """Backend of 1-bit Adam."""
    max_coeff: Anything = no_effect(None, _OTHER)
    """Of LAMB."""
    min_coeff: Anything = no_effect(None, _OTHER)
    """Of LAMB."""
    momentum: Anything = no_effect(None, _OTHER)
    """Of SGD."""


class OptimizerSection(Section):
    """The optimizer. Without this section one is passed to `initialize`."""

    type: Annotated[Literal["Adam", "AdamW"], OneOf(advice_on)]
    """Adam means AdamW unless adam_w_mode is false."""
    params: OptimizerParams = OptimizerParams()
    legacy_fusion: Bool = no_effect(False, KERNEL)
    """An older fused kernel."""
