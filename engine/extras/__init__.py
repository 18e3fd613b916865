"""Plug-ins of the engine. `zstore.engine` imports this, so that every config knows the sections of the extras, without torch.

An extra is imported only if its section is on, and the rules, codecs and exchanges of all before a model is laid out.
"""

from functools import partial
from importlib import import_module
from pkgutil import resolve_name

from ..config.extra import register
from ..config.keys import Section
from ..config.optimizers import OPTIMIZERS
from ..config.schema import add_section
from .elasticity import ElasticitySection
from .one_bit.section import OneBitAdamParams, OneBitLambParams, ZeroOneAdamParams
from .sparse_attention.section import Pattern
from .whole_tensors.section import AdafactorParams, LambParams, MuonParams

_EXTRAS: dict[str, tuple[str, type[Section] | None]] = {
    "sparse_attention": ("sparse_attention.attend:SparseAttention", Pattern),
}

for _key, (_home, _section) in _EXTRAS.items():
    register(_key, partial(resolve_name, f"{__name__}.{_home}"), _section)
add_section("elasticity", ElasticitySection)
OPTIMIZERS.update(
    {
        "Lamb": LambParams,
        "Adafactor": AdafactorParams,
        "Muon": MuonParams,
        "OneBitAdam": OneBitAdamParams,
        "ZeroOneAdam": ZeroOneAdamParams,
        "OneBitLamb": OneBitLambParams,
    }
)


def register_parts() -> None:
    """Register the rules, codecs and exchanges of the extras, with torch."""
    for name in ("moments", "one_bit.step", "whole_tensors.step", "zeropp"):
        import_module(f"{__name__}.{name}")
