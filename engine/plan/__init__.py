"""Where every byte rests and when it moves, decided from sizes and settings alone."""
