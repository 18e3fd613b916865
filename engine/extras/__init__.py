"""Plug-ins of the engine. `zstore.engine` imports this, so that every config knows the sections of the extras, without torch.

An extra is imported only if its section is on; rules, codecs and exchanges are registered by packages that `initialize`
imports.
"""

from functools import partial
from pkgutil import resolve_name

from ..config.extra import register
from ..config.schema import add_section
from .elasticity import ElasticitySection
from .sparse_attention.section import SparseAttentionSection

_HOMES = {
    "zstore.journal": "journal.journal:RunJournal",  # first: it notes a step before others take their time
    "sparse_attention": "sparse_attention.models:SparseAttention",
    "curriculum_learning": "curriculum.sequences:SequenceCurriculum",
    "flops_profiler": "profiling.step:StepProfile",
    "zstore.publish": "publish:WeightsPublisher",
}

for _key, _home in _HOMES.items():
    register(_key, partial(resolve_name, f"{__name__}.{_home}"))
add_section("elasticity", ElasticitySection)
add_section("sparse_attention", SparseAttentionSection)
