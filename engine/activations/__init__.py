"""Tensors that a forward saves for its backward: recomputed, or off the device."""
