"""The process that trains: its ranks, signals, threads and messages."""
