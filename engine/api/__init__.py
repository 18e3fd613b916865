"""The calls of a script: `initialize`, the class `Engine`, and the ways of its backwards."""
