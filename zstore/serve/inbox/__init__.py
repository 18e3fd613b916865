"""Checkpoints that are taken in: uploads on disk, what they must bring, and their commits."""
