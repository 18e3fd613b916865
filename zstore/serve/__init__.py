"""`zstore serve`: runs and their checkpoints over HTTP. `app.make_app` is the application, `app.run` serves it."""
