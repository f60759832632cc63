"""What needs the bytes of tokens on both sides of the wire: token bytes and stop strings."""
