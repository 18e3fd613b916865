"""Checkpoints that are taken in: uploads on disk, their expected files, and their commits."""
