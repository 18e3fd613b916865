"""Checkpoints that other software wrote, read as arrays. No torch, and nothing that a file names is ever called."""
