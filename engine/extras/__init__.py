"""Plug-ins of the engine. `zstore.engine` imports this, so that every config knows the sections of the extras, without torch.

An extra is imported only if its section is on; rules, codecs and exchanges are registered by packages that `initialize`
imports.
"""

from functools import partial
from pkgutil import resolve_name

from ..config.extra import register
from ..config.schema import add_section
from .elasticity import ElasticitySection

# First: it notes a step before others take their time.
register("zstore.journal", partial(resolve_name, f"{__name__}.journal.journal:RunJournal"))
register("sparse_attention", partial(resolve_name, f"{__name__}.sparse_attention:SparseAttention"))
register("curriculum_learning", partial(resolve_name, f"{__name__}.curriculum.sequences:SequenceCurriculum"))
register("flops_profiler", partial(resolve_name, f"{__name__}.profiling.step:StepProfile"))
register("zstore.publish", partial(resolve_name, f"{__name__}.publish:WeightsPublisher"))
add_section("elasticity", ElasticitySection)
