"""Curricula of training data: sequences that grow, samples that become harder."""
