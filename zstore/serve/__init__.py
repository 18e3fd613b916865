"""The service: checkpoints and runs over HTTP, and a page that shows them. Needs the extra `serve`; imported by it alone.

Read in this order: settings, runs, models, service, replies, app, server; then `routes`, and their foundations: `views`,
`files`, `inbox`, `guard`. `assets` is the page. `report` makes one file of it, without the extra.
"""
