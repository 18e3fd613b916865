"""Muon for matrices and AdamW for everything else, in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError

from ...optim.classes import called
from ...optim.rules import Groups, Kind

_MUON = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
_NO_HIDDEN = ("embed", "lm_head")
"""Parts of the names of parameters that are not of hidden layers, as DeepSpeed has them."""


class MuonWithAdam(torch.optim.Optimizer):
    """`torch.optim.Muon` for the groups with `use_muon`, whose parameters are matrices, and `torch.optim.AdamW` for the
    others.

    Groups have the arguments of their class; what they leave out is DeepSpeed's: lr 0.02 and momentum 0.95 of Muon, lr 0.0003,
    betas (0.9, 0.95) and eps 1e-10 of Adam, no weight decay. `split_for_muon` makes groups of a model.

    Raises UsageError for a group without `use_muon`.
    """

    def __init__(self, params: Iterable[Mapping[str, Any]]) -> None:
        groups: list[dict[str, Any]] = []
        for given in params:
            group: Any = given
            kind: Any
            if not isinstance(group, Mapping) or not isinstance(group.get("use_muon"), bool):
                raise UsageError(
                    'MuonWithAdam: expected groups {"params": ..., "use_muon": True or False, ...}; '
                    "split_for_muon(model) makes them"
                )
            settings = {name: value for name, value in given.items() if name not in ("params", "use_muon")}
            kind, defaults = (torch.optim.Muon, _MUON) if given["use_muon"] else (torch.optim.AdamW, _ADAM)
            one = kind([{"params": given["params"]}], **{**defaults, **settings})  # which may be empty
            groups.append({**one.param_groups[0], "use_muon": given["use_muon"]})
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure` returned."""
        loss = called(closure)
        for group in self.param_groups:
            one: Any = (torch.optim.Muon if group["use_muon"] else torch.optim.AdamW)([{"params": group["params"]}])
            # They work on this object's groups and state, whatever a load put in their place.
            one.param_groups, one.state = [group], self.state
            one.step()
        return loss


def split_for_muon(
    model: nn.Module, parameters: Iterable[nn.Parameter] | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters for Muon and those for Adam, of all that are trained or of `parameters`.

    Muon is for the matrices of hidden layers: 2-D, not the weight of an `nn.Embedding`, and without "embed" or "lm_head" in
    their name. An attribute `use_muon` of a parameter says otherwise. Raises UsageError where that is true of what is no
    matrix.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    muon: list[nn.Parameter] = []
    adam: list[nn.Parameter] = []
    for parameter in model.parameters() if parameters is None else parameters:
        name = names.get(parameter, "").lower()
        is_hidden = parameter.dim() == 2 and parameter not in embeddings and not any(one in name for one in _NO_HIDDEN)
        asked = getattr(parameter, "use_muon", is_hidden)
        if asked and parameter.dim() != 2:
            raise UsageError(
                f"parameter {names.get(parameter)!r} has use_muon = True, but Muon is for matrices, and its shape is "
                f"{tuple(parameter.shape)}: remove the attribute"
            )
        if parameter.requires_grad:
            (muon if asked else adam).append(parameter)
    return muon, adam


def muon_from_config(_: Kind, groups: Groups, arguments: Mapping[str, Any], model: nn.Module) -> MuonWithAdam:
    """Return an optimizer of each group as two, one for Muon and one for Adam, if it has parameters for both; a group without
    any that is trained stays one, an empty one of Adam's."""
    rates = {name: arguments[name] or arguments["lr"] for name in ("muon_lr", "adam_lr")}
    muon = {name: arguments[name] for name in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "weight_decay")}
    adam = {name: arguments[name] for name in ("betas", "eps", "weight_decay")}
    found: Groups = []
    for group in groups:
        own = {name: value for name, value in group.items() if name != "params"}
        unnamed = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        split = split_for_muon(model, unnamed)
        for parameters, (uses, settings) in zip(split, ((True, muon), (False, adam)), strict=True):
            rate = rates["muon_lr" if uses else "adam_lr"]
            named = {} if rate is None else {"lr": rate}
            known = {name: value for name, value in own.items() if name in settings or name == "lr"}
            if parameters or not (uses or any(split)):
                found.append({**settings, **named, **known, "params": parameters, "use_muon": uses})
    return MuonWithAdam(found)
