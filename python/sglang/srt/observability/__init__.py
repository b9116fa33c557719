"""What the engine tells about itself: traces, metrics, statistics, logs."""
