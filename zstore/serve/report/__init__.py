"""A run as one file: the page with its data inside. Needs no server."""
