"""`zstore serve`: runs and their checkpoints over HTTP. `app.make_app` is the application, `server.run` runs it."""
