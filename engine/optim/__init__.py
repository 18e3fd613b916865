"""Optimizer state, its update, and what steers it: kernels, step modes, loss scale, schedules."""
