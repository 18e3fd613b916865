"""Giving a pattern to the attention of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from zstore.errors import UsageError

from ...config.extra import Extra
from .attend import attend
from .patterns import Pattern
from .section import SparseAttentionSection

Attend = Callable[..., torch.Tensor]
"""`attend(query, key, value, is_causal=..., mask=None, dropout_p=0.0, scale=None)`; see `zstore.attention.attend`."""

_UNSUPPORTED = ("softcap", "position_bias", "s_aux")
"""Arguments of transformers' attention beside a mask."""


@runtime_checkable
class TakesAttention(Protocol):
    """A module whose attention is a function that can be replaced."""

    def use_attention(self, attend: Attend) -> None:
        """Compute attention by `attend` from now on."""


def apply(model: nn.Module, pattern: Pattern) -> int:
    """Let attention in `model` be under `pattern`; return how many modules or transformers models took it.

    Takes part: a module that has `use_attention(attend)`, as those of zstore's own models, and a transformers model whose
    attention is one of those that transformers can exchange. In the latter attention to another sequence stays dense.
    Raises UsageError if nothing takes part.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, TakesAttention):
            module.use_attention(partial(attend, pattern=pattern))
            count += 1
    for holder in _transformers_models(model):
        _use_in_transformers(holder, pattern)
        count += 1
    if not count:
        raise UsageError(
            f"sparse_attention: {type(model).__name__} has no attention that can be exchanged: call "
            "zstore.attention.attend(query, key, value, pattern) in its forward and take the section out of the config, "
            "or give its attention modules a method use_attention(attend)"
        )
    return count


def _transformers_models(model: nn.Module) -> list[nn.Module]:
    """Return the outermost models of transformers in `model`."""
    found: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        if callable(getattr(module, "set_attn_implementation", None)) and module not in inner:
            found.append(module)
            inner.update(module.modules())
    return found


def _use_in_transformers(model: Any, pattern: Pattern) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = f"zstore_sparse_{abs(hash(pattern)):x}"
    AttentionInterface.register(name, _transformers_attention(pattern))
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        model.set_attn_implementation(name)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"sparse_attention: transformers cannot exchange the attention of {type(model).__name__}: {error}; "
            "take the section out of the config"
        ) from error


def _transformers_attention(pattern: Pattern) -> Callable[..., tuple[torch.Tensor, None]]:
    def forward(  # noqa: PLR0913, PLR0917 - the arguments of transformers' call
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        given = [name for name in _UNSUPPORTED if others.get(name) is not None]
        if given:
            raise UsageError(f"sparse_attention: {type(module).__name__} needs {given[0]}, which is not supported")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask > torch.finfo(mask.dtype).min / 2
        options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
        if not causal and query.shape[2] != key.shape[2]:  # to another sequence
            mixed = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1], **options
            )
        else:
            mixed = attend(query, key, value, pattern, mask=mask, is_causal=causal and mask is None, **options)
        return mixed.transpose(1, 2).contiguous(), None

    return forward


class SparseAttention(Extra):
    """Gives the config's pattern to a model."""

    acts_frozen = True

    @classmethod
    def prepare(cls, model: nn.Module, section: SparseAttentionSection) -> None:
        """Let the model's attention follow the pattern. Raises UsageError for a model of another kind."""
        apply(model, section.pattern())
