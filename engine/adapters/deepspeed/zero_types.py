"""The enumerations of DeepSpeed's ZeRO that scripts compare with."""

from enum import Enum, IntEnum


class ZeroParamStatus(Enum):
    """Whether a parameter has its values now."""

    AVAILABLE = 1
    """It has all of them."""
    NOT_AVAILABLE = 2
    """They are sharded; GatheredParameters gives them."""
    INFLIGHT = 3
    """They are on their way; a parameter is never said to be in this state."""


class ZeroStageEnum(IntEnum):
    """ZeRO's stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):  # noqa: UP042 - DeepSpeed's base
    """Where state is offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042 - DeepSpeed's base
    """Which state `engine.offload_states` is about."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
