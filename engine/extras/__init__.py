"""Plug-ins of the engine. `zstore.engine` imports this package, without torch, so that every config knows the sections of
the extras.

A section modifies a model in `prepare`; the rules, codecs and exchanges of all extras are registered before a model is
sharded.
"""

from importlib import import_module

from ..config.optimizers import OPTIMIZERS
from ..config.sections import add_section
from .elasticity import ElasticitySection
from .sections import (
    AdafactorParams,
    LambParams,
    MuonParams,
    OneBitAdamParams,
    OneBitLambParams,
    Pattern,
    ZeroOneAdamParams,
)

add_section("sparse_attention", Pattern)
add_section("elasticity", ElasticitySection)
for _params in (LambParams, AdafactorParams, MuonParams, OneBitAdamParams, ZeroOneAdamParams, OneBitLambParams):
    OPTIMIZERS[_params.__name__.removesuffix("Params")] = _params


def register_parts() -> None:
    """Register the rules, codecs and exchanges of the extras, which import torch."""
    for name in ("moments", "one_bit", "whole_tensors", "zeropp"):
        import_module(f"{__name__}.{name}")
