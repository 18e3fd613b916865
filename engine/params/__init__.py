"""Parameters of the model: their records, units and types."""
