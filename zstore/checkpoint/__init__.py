"""Checkpoints: format, writing, reading, commit and retention."""
