"""Routes, and what is HTTP's own: callers, bodies, connections, server-sent events."""
