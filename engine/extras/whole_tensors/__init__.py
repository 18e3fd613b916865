"""Optimizers whose step needs a whole tensor: Adafactor, LAMB and Muon."""
