"""The bytes of arrays, shards and chunks. Pure: no I/O, no threads, no torch."""
