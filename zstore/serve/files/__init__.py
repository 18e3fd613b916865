"""Files of checkpoints and of weights, as bytes: the visible ones, ranges, blocks on their way to clients. No HTTP."""
