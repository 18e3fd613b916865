"""transformers' Trainer on zstore, and every subclass of it: `wrap(TrainerClass)`, or `ZstoreTrainerMixin` (extra `hf`).

`Trainer` and `Seq2SeqTrainer` are transformers' own, wrapped. So are, by their names, those of an installed trl or
sentence-transformers: `from zstore.hf import SFTTrainer`.
"""

from importlib import import_module
from typing import Any

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

_LIBRARIES = ("trl", "sentence_transformers")


def __getattr__(name: str) -> Any:
    """Return the Trainer of that name of an installed library, wrapped."""
    missing = []
    for library in _LIBRARIES if name.endswith("Trainer") else ():
        try:
            found = getattr(import_module(library), name, None)
        except ModuleNotFoundError as error:
            if error.name != library:
                raise
            missing.append(library.replace("_", "-"))
        else:
            if found is not None:
                return globals().setdefault(name, wrap(found))
    if missing:
        raise ImportError(
            f"zstore.hf has no {name!r}. For a Trainer of {' or '.join(missing)}: pip install {missing[0]}"
        )
    raise AttributeError(f"zstore.hf has no {name!r}; zstore.hf.wrap() takes any subclass of transformers.Trainer")
