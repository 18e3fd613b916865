"""The service: checkpoints and runs over HTTP, and a page that shows them. Needs the extra `serve`; imported by it alone.

Read in this order: settings, runs, models, service, replies, app, server; then one module for each kind of route.
"""
