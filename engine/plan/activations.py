"""Memory of the activations, estimated from a model's width and depth: for `zstore plan`, and for a device that is to be filled
with optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_BYTES_PER_TOKEN_AND_WIDTH = 34
"""Bytes of one layer in 16 bits; see `Activations`."""
_KEPT_PER_TOKEN_AND_WIDTH = 2
_FP32_BYTES = 4
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_positions")


@dataclass(frozen=True, kw_only=True)
class Width:
    """The dimensions of a model that its activations follow from."""

    hidden: int
    """Width of the residual stream, in elements."""
    num_layers: int
    vocab_size: int
    longest: int | None = None
    """Tokens of the longest sequence; None: not known."""

    @classmethod
    def of(cls, model: Any) -> Width | None:
        """Return the shape in the model's own config; None if there is none, or it is incomplete."""
        config: Any = getattr(model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        hidden, vocab_size = hidden_size(model), getattr(config, "vocab_size", None)
        layers, longest = _first(config, _LAYERS), _first(config, _LENGTHS)
        if hidden is None or layers is None or vocab_size is None:
            return None
        return cls(hidden=hidden, num_layers=int(layers), vocab_size=int(vocab_size), longest=longest)


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one forward on one rank, about.

    34 s b h bytes a layer in 16 bits: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
    (https://arxiv.org/abs/2205.05198), section 4.1, without the term in s^2, which attention kernels that keep no scores
    do not have. With checkpointing of every layer 2 s b h, and one layer in full. The logits are added: once in the
    compute type, in fp32 for the loss, and the gradient of that.
    """

    width: Width
    tokens: int
    """Of all samples of the forward."""
    itemsize: int
    """Bytes of an element in the compute type."""
    checkpointing: bool

    @property
    def kept_bytes(self) -> int:
        """Tensors that layers save until their backward: those that go to host memory or disk with "activations"."""
        per_token = _KEPT_PER_TOKEN_AND_WIDTH if self.checkpointing else _BYTES_PER_TOKEN_AND_WIDTH
        return self._of_layer(per_token) * self.width.num_layers

    @property
    def total_bytes(self) -> int:
        """All of it."""
        again = self._of_layer(_BYTES_PER_TOKEN_AND_WIDTH) if self.checkpointing else 0
        logits = self.tokens * self.width.vocab_size * (self.itemsize + 2 * _FP32_BYTES)
        return self.kept_bytes + again + logits

    def bytes_on_device(self, rest: Literal["device", "host", "disk"]) -> int:
        """Return those of a device of its own memory, if kept tensors wait for the backward on `rest`."""
        return self.total_bytes - (0 if rest == "device" else self.kept_bytes)

    def _of_layer(self, per_token_and_width: int) -> int:
        return per_token_and_width * self.tokens * self.width.hidden * self.itemsize // 2


def hidden_size(model: Any) -> int | None:
    """Return the width that the model's own config names, as transformers has it."""
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "d_model", "n_embd", "hidden", "hidden_sizes"):
            width = getattr(holder, name, None)
            if isinstance(width, list | tuple) and width:
                width = max(width)
            if isinstance(width, int):
                return width
    return None
