"""The text, tokens and models that `zstore train` has of its own."""
