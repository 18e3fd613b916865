"""A compact ZeRO training engine on top of the tensor store.

Packages from the bottom: runtime, config, params and device, plan, zero, optim, build; then `training` and `wiring`; then
access, checkpoint and report; then `engine` and `initialize`. `docs/how-it-works.md` follows a parameter through them.
"""

from . import extras as extras
from .access.gather import gather
from .build.init import Init
from .build.pretrained import from_pretrained
from .config.arguments import add_config_arguments
from .engine import Engine
from .initialize import initialize
from .report.statistics import EngineStatistics
from .runtime.distributed import init_distributed

__all__ = [
    "Engine",
    "EngineStatistics",
    "Init",
    "add_config_arguments",
    "from_pretrained",
    "gather",
    "init_distributed",
    "initialize",
]
