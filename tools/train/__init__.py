"""`zstore train`: the training loop of the command, its processes and its config."""
