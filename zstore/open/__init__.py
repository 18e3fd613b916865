"""Checkpoints of any writer, and stores, opened from Python."""
