"""Models as mlx-lm makes them: how their own call is entered, and whether a lane says what they say."""
