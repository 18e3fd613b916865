"""`python -m zstore.as_deepspeed`: `import deepspeed` gives zstore in a process and in those that it starts. No torch."""
