"""Whole tensors of a run, read and changed by name, and weights for other software."""
