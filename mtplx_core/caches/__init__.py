"""Caches of a model's layers for rows of different lengths."""
