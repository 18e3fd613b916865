"""The device that computes: its streams, and copies between it and the host."""
