"""What a run tells about itself: progress, monitors, statistics, memory."""
