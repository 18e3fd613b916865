"""Difficulties that rise with the steps: the length of sequences, and metrics by which samples are drawn."""
