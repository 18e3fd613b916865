"""Files of checkpoints and of weights, as bytes: what is visible, ranges, blocks on their way to clients. No HTTP."""
