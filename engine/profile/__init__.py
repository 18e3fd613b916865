"""What a model computes, how fast, and what memory it takes: operations by module, utilisation, estimates."""
