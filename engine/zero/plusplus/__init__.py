"""ZeRO++ and MiCS over the core: shards within groups of ranks, and parameters and gradients that travel as integers."""
