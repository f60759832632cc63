"""Models as mlx-lm makes them: what checkpoints say, and whether a lane says what its model says."""
