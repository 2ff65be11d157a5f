"""What a process says about itself: its log, its spans, its metrics."""
