"""Loops of Hugging Face Accelerate on zstore: `from zstore.accelerate import Accelerator` (extra `hf`)."""

try:
    import accelerate as _library
except ImportError as error:
    raise ImportError("zstore.accelerate needs Accelerate, which is not installed: pip install 'zstore[hf]'") from error

from .accelerator import Accelerator

del _library

__all__ = ["Accelerator"]
