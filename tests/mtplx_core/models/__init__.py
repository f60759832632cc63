"""Models: their own call, and whether a lane says what they say."""
