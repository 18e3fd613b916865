"""transformers' Trainer, and trl's, on zstore: `wrap(TrainerClass)`, or `ZstoreTrainerMixin` (extra `hf`).

`Trainer` and `Seq2SeqTrainer` are transformers' own, wrapped.
"""

try:
    import accelerate as _accelerate
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        "zstore.hf needs transformers and accelerate, which are not installed: pip install 'zstore[hf]'"
    ) from error

from .trainer import Seq2SeqTrainer, Trainer, ZstoreTrainerMixin, wrap

del _accelerate, _transformers

__all__ = ["Seq2SeqTrainer", "Trainer", "ZstoreTrainerMixin", "wrap"]
