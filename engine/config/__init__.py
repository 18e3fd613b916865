"""The engine's configuration: the DeepSpeed JSON dialect and zstore's own settings, checked, typed and frozen.

`load_config(source)` reads and checks, `Config.notices()` names each key that does not act, `Config.resolve(context)`
fills in "auto" and the batch sizes; the engine reads the properties of what that returns. The keys are in `schema` and
`zero`.
"""

from .answers import read_answers
from .arguments import add_config_arguments
from .config import (
    Config,
    IoConfig,
    OffloadConfig,
    OptimizerConfig,
    load_config,
    read_config,
)
from .parse import Notice
from .resolve import BatchSizes, ResolveContext

__all__ = [
    "BatchSizes",
    "Config",
    "IoConfig",
    "Notice",
    "OffloadConfig",
    "OptimizerConfig",
    "ResolveContext",
    "add_config_arguments",
    "load_config",
    "read_answers",
    "read_config",
]
