"""A compact ZeRO training engine on top of the tensor store.

Read in this order: sharding, parameters, units, hooks, collectives, gradients, norm, kernel, state, training, engine;
then wiring and initialize, and checkpointing with record; and whole, access, gathered, export, calls. Before a model is
given to the engine: building, init, handover, pretrained.
"""

from .access.gather import gather
from .build.init import Init
from .build.pretrained import from_pretrained
from .config import add_config_arguments
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
