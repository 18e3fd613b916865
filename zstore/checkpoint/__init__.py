"""Checkpoints: the format, saving and committing, reading and verifying, retention. Imports no torch.

Read `docs/format.md` for the bytes, and in this order: names, format, metadata; request, known, publish, pieces, gather,
commit, handle, write; folder, catalog, source, read, ahead, verify,
reshard, usage, keep, retention.
"""
