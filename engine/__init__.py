"""A compact ZeRO training engine on top of the tensor store.

Packages from the bottom: runtime, config, params, plan, zero, optim, build, training; then access, checkpoint and report; then
api. `docs/how-it-works.md` follows a parameter through them. `Engine` is imported when it is first used: `config` and the
planners in `plan` load no torch.
"""

from typing import TYPE_CHECKING, Any

from . import extras as extras

if TYPE_CHECKING:
    from .api.engine import Engine as Engine


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .api.engine import Engine

    return Engine
