"""Moments of the optimizer in bf16 or 8 bits (`zstore.moments`)."""

from ...optim.rules import register_codec
from .tiles import moment_codec

register_codec(moment_codec)
