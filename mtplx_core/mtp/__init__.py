"""The engine that drafts, verifies and commits several tokens of each row per cycle."""
