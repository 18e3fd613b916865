"""`zero_to_fp32.py`, which is beside the checkpoints of `save_checkpoint`, imports its command from here."""

from zstore.tools.zero_to_fp32 import main

__all__ = ["main"]
