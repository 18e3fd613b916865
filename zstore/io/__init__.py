"""Bytes between memory and drives: threads, buffers, shard files."""
