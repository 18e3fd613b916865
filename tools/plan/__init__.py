"""`zstore plan`: where the state of a training run fits on a machine."""
