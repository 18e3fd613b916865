"""The ranks of a run: collectives, and what ends one rank ending all."""
