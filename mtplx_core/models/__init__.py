"""What checkpoints are and say of themselves."""
