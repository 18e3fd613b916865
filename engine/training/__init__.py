"""A run: its parts, how they are made, and the steps that change it."""
