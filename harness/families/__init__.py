"""Every text family of the installed mlx-lm as a tiny random checkpoint, and what a lane makes of each."""
