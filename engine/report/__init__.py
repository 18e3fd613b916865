"""Reports of a run: progress, monitors, statistics, memory."""
