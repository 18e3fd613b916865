"""What `zstore train` trains on its own: text, tokens and models."""
