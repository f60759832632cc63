"""Connections to Redis: how they open, what their failures mean, which rights they need."""
