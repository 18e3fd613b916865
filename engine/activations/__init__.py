"""What a forward keeps for its backward: recomputed, shared among ranks, or off the device."""
