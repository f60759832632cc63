"""The workers room: the daemon that takes jobs, owns the MLX thread and commits tokens. No text, no HTTP."""
