"""Loops of Hugging Face Accelerate on zstore: `from zstore.accelerate import Accelerator` (extra `hf`)."""

from zstore.engine.adapters.accelerate import Accelerator

__all__ = ["Accelerator"]
