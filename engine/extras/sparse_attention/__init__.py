"""Block-sparse attention: patterns, their masks, attention under them, and what gives it to a model (`sparse_attention`)."""
