"""Where a shard rests: host memory or disk, behind one contract."""
