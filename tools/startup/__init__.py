"""The folder on the PYTHONPATH of each Python process started by one that uses zstore as deepspeed."""
