"""Checks around all requests: who may ask, how large and slow a request may be, connections, TLS."""
