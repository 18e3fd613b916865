"""Plug-ins of the engine: `initialize` alone imports these packages, which register their own parts.

Those with a section of the config are imported only if it is on.
"""

from functools import partial
from pkgutil import resolve_name

from ..config.extra import register
from . import moments as moments
from . import one_bit as one_bit
from . import whole_tensors as whole_tensors
from . import zeropp as zeropp

# First: it notes a step before others take their time.
register("zstore.journal", partial(resolve_name, f"{__name__}.journal.journal:RunJournal"))
register("sparse_attention", partial(resolve_name, f"{__name__}.sparse_attention:SparseAttention"))
register("curriculum_learning", partial(resolve_name, f"{__name__}.curriculum.sequences:SequenceCurriculum"))
register("flops_profiler", partial(resolve_name, f"{__name__}.profiling.step:StepProfile"))
register("zstore.publish", partial(resolve_name, f"{__name__}.publish:WeightsPublisher"))
