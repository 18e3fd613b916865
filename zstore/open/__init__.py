"""Checkpoints opened from Python, whoever wrote them."""
