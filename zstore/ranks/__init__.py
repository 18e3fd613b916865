"""The ranks of a run: collectives, and an end of all if one fails."""
