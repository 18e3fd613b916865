"""The folder on the PYTHONPATH of each Python that a process with zstore's answer starts."""
