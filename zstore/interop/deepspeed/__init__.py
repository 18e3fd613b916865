"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, with state on NVMe, and universal ones. docs/deepspeed.md lists the parts."""
