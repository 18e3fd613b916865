"""Lightning's Trainer on the engine: `from zstore.lightning import ZstoreStrategy` (extra `lightning`)."""

from zstore.engine.adapters.lightning import ZstoreStrategy, load_checkpoint

__all__ = ["ZstoreStrategy", "load_checkpoint"]
