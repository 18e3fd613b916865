"""`zstore plan`: what of a training run fits where on a machine."""
