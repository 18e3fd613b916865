"""The `zstore` command."""
