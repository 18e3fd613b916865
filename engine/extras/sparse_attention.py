"""Attention in blocks (`sparse_attention`) for models whose attention can be replaced."""

from torch import nn

from zstore.attention import apply

from ..config.extra import Extra
from ..config.sparse_attention import SparseAttentionSection


class SparseAttention(Extra):
    """Gives the config's pattern to a model."""

    acts_frozen = True

    @classmethod
    def prepare(cls, model: nn.Module, section: SparseAttentionSection) -> None:
        """Let the model's attention follow the pattern. Raises UsageError for a model of another kind."""
        apply(model, section.pattern())
