"""The Redis-compatible server that comes along, and the guard that ends it with its parent."""
