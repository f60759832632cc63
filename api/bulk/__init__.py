"""Many rows of a file answered through the queue: what the file holds, the run, and the file of answers."""
