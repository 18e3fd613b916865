"""A model's computation and memory: operations by module, utilisation, estimates."""
