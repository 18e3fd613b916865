"""Checkpoints: the format, saving and committing, reading and verifying, retention. Imports no torch.

Read `docs/format.md` for the bytes, and in this order: names, format, metadata; request, reuse, publish, pieces, gather,
commit, handle, save; folder, catalog, source, reader, lookahead, verify, reshard, usage, keep, retention.
"""
