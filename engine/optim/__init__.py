"""Optimizer state, its update, and the control of both: kernels, step modes, loss scale, schedules."""
