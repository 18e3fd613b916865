"""A run: its parts, their construction, and the steps that change it."""
