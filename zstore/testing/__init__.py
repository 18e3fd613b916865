"""The test kit: contract suite, in-memory model, latency and fault wrappers, spawned ranks."""
