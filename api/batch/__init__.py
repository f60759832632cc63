"""Running batches of calls."""
