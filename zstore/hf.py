"""transformers' Trainer on zstore, and every subclass of it: `from zstore.hf import Trainer, SFTTrainer, wrap` (extra `hf`)."""

from typing import Any

from zstore.engine.adapters import huggingface
from zstore.engine.adapters.huggingface import Seq2SeqTrainer, Trainer, ZstoreTrainerMixin, wrap

__all__ = ["Seq2SeqTrainer", "Trainer", "ZstoreTrainerMixin", "wrap"]


def __getattr__(name: str) -> Any:
    """Return the Trainer of that name of an installed library, wrapped."""
    return getattr(huggingface, name)
