"""Rules: how the parameters of an optimizer's class are updated.

[Note: rules]
A rule names optimizer classes, gives the kernel of each of their parameter groups, and the stepper. Without a stepper
steps run over tiles. Besides those here, `register` takes rules of others, as `engine/extras` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.ranks.world import World

from ..config.config import Config
from ..plan.plan import Slots
from .kernel import ELEMENT_WISE, Kernel, SlotCodec, kernel_for
from .state import OptimizerState
from .stepper import ClientStep, Stepper, WholeKernel, require_no_closure

Kind = type[torch.optim.Optimizer]
Groups = list[dict[str, Any]]
"""Groups of parameters with settings, as torch's optimizers take them."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How optimizers of some classes update. See [Note: rules]."""

    kinds: tuple[Kind, ...]
    """The classes; a config uses their names."""
    kernel: Callable[[Kind, Mapping[str, Any]], Kernel]
    """Gives the kernel of a parameter group with these settings; parameters may be on the meta device."""
    stepper: Callable[[torch.optim.Optimizer, OptimizerState, World], Stepper] | None = None
    """Makes the stepper, for all ranks. None: steps run over tiles."""
    slots: Callable[[Kernel, Sequence[int], int], Slots] = lambda kernel, *_: kernel.slots
    """Gives a kernel's arrays for a parameter of a shape, at a world size, for the plan."""
    make: Callable[[Any, Groups, Mapping[str, Any], nn.Module], torch.optim.Optimizer] | None = None
    """Makes an optimizer of the class over a model, from groups, which keep the settings that they have, and a config's
    arguments. None: the class itself does."""


TILES = Rule(kinds=ELEMENT_WISE, kernel=kernel_for)
"""Updates run over tiles."""
CLIENT = Rule(
    kinds=(),
    kernel=lambda _kind, _group: WholeKernel(),
    stepper=lambda client, state, _: ClientStep(client, state),
)
"""The client's own object takes the steps; see [Note: the client's own step]."""
_rules: dict[Kind, Rule] = {}


def register(rule: Rule) -> None:
    """Let engines take optimizers of the rule's classes; a class has the rule that was registered last."""
    _rules.update(dict.fromkeys(rule.kinds, rule))


register(TILES)


MakeCodec = Callable[[Config, Sequence[Kernel], str], SlotCodec | None]
"""Returns the codec that a config asks for, for the kernels of an optimizer of this name; None: it asks for none."""
codecs: list[MakeCodec] = []


def codec_of(config: Config, kernels: Sequence[Kernel], kind: str) -> SlotCodec:
    """Return how slots are stored. Raises the errors of the registered functions."""
    return next((codec for make in codecs if (codec := make(config, kernels, kind)) is not None), SlotCodec())


def classes() -> dict[str, Kind]:
    """Return the classes that have a rule, by name."""
    return {kind.__name__: kind for kind in _rules}


def rule_of(kind: Kind, *, whole: bool = False) -> Rule:
    """Return the rule of a class. One without a rule is stepped by its own object if all state is `whole` on every rank's
    device; else it gets the rule of tiles, whose kernel refuses it."""
    return _rules.get(kind, CLIENT if whole else TILES)


def kernels_for(rule: Rule, kind: Kind, groups: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """Return the kernel of each group. Raises the errors of `kernel_for`."""
    return [rule.kernel(kind, group) for group in groups]


def check_client(client: torch.optim.Optimizer, config: Config) -> None:
    """Raise UsageError if the config does not let the client's own object take the steps."""
    require_no_closure(client)
    if config.step_overlap == "backward":
        raise UsageError(
            f"optimizer {type(client).__name__} steps whole fp32 tensors, all at once: take step_overlap out of the config's "
            '"zstore" section'
        )
