"""The folder that Pythons find on PYTHONPATH which a process with zstore's answer starts."""
