"""Plug-ins of the engine: `initialize` alone imports these packages, which register their own parts.

Those with a section of the config are imported only if it is on.
"""

from functools import partial
from importlib import import_module

from ..config.extra import Extra, register
from . import moments as moments
from . import one_bit as one_bit
from . import whole_tensors as whole_tensors
from . import zeropp as zeropp


def _load(module: str, name: str) -> type[Extra]:
    found: type[Extra] = getattr(import_module(f"{__name__}.{module}"), name)
    return found


register("sparse_attention", partial(_load, "sparse_attention", "SparseAttention"))
register("curriculum_learning", partial(_load, "curriculum.sequences", "SequenceCurriculum"))
register("flops_profiler", partial(_load, "profiling.step", "StepProfile"))
register("zstore.publish", partial(_load, "publish", "WeightsPublisher"))
