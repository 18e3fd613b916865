"""A compact ZeRO training engine on top of the tensor store.

Packages from the bottom: runtime, config, params and device, plan, zero, optim, build; then `training` and `wiring`; then
access, checkpoint and report; then `engine` and `initialize`. `docs/how-it-works.md` follows a parameter through them.
Names are imported when they are first used: `config` and the planners in `plan` load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import extras as extras

if TYPE_CHECKING:
    from .access.gather import gather as gather
    from .build.init import Init as Init
    from .build.pretrained import from_pretrained as from_pretrained
    from .config.arguments import add_config_arguments as add_config_arguments
    from .engine import Engine as Engine
    from .report.statistics import EngineStatistics as EngineStatistics
    from .runtime.distributed import init_distributed as init_distributed

_HOMES = {
    "Engine": ".engine",
    "EngineStatistics": ".report.statistics",
    "Init": ".build.init",
    "add_config_arguments": ".config.arguments",
    "from_pretrained": ".build.pretrained",
    "gather": ".access.gather",
    "init_distributed": ".runtime.distributed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
