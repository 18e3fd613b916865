"""Where every byte is kept and when it moves, decided from sizes and settings alone."""
