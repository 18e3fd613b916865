"""Optimizer classes that torch does not have; `zstore.optim` hands them out."""
