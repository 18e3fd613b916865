"""The place of every byte and the time of its moves, decided from sizes and settings."""
