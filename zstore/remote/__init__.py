"""Checkpoints behind URLs: read by ranges, uploaded in the background, committed by a record that is written last.

Imports fsspec only when a URL is opened, and no torch. Read in this order: bucket, service; target, upload.
"""
