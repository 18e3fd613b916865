"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, with state on NVMe, and universal ones. docs/deepspeed.md lists the parts."""

from .source import DeepSpeedSource, open_deepspeed

__all__ = ["DeepSpeedSource", "open_deepspeed"]
