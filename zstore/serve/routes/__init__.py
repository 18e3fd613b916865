"""The routes: each module has those of one kind, `api` all below `/api`."""
