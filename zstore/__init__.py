"""zstore: an async tensor store for training state, and a compact ZeRO engine on top of it.

Names are imported on first use, so that `import zstore` is cheap and does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from zstore import checkpointing, zero
    from zstore.engine.access.safe_access import gather
    from zstore.engine.api.initialize import initialize
    from zstore.engine.build.init import Init
    from zstore.engine.build.pretrained import from_pretrained
    from zstore.engine.config.config import add_config_arguments
    from zstore.engine.runtime.process import init_distributed

    from .errors import ZstoreError
    from .open.checkpoint import load_state_dict, open_checkpoint, open_checkpoint_async
    from .open.sources import open_store
    from .store import Store

__all__ = [
    "Init",
    "Store",
    "ZstoreError",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "from_pretrained",
    "gather",
    "init_distributed",
    "initialize",
    "load_state_dict",
    "open_checkpoint",
    "open_checkpoint_async",
    "open_store",
    "zero",
]

_HOMES = {
    "Init": "zstore.engine.build.init",
    "Store": "zstore.store",
    "ZstoreError": "zstore.errors",
    "add_config_arguments": "zstore.engine.config.config",
    "checkpointing": "zstore.checkpointing",
    "from_pretrained": "zstore.engine.build.pretrained",
    "gather": "zstore.engine.access.safe_access",
    "init_distributed": "zstore.engine.runtime.process",
    "initialize": "zstore.engine.api.initialize",
    "load_state_dict": "zstore.open.checkpoint",
    "open_checkpoint": "zstore.open.checkpoint",
    "open_checkpoint_async": "zstore.open.checkpoint",
    "open_store": "zstore.open.sources",
    "zero": "zstore.zero",
}
"""Public name -> the module that defines it, or is it."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(home)
    value = module if home == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
