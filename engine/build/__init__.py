"""Models built or loaded straight into shards."""
