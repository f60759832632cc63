"""The command line's rooms: what `up`, `status`, `doctor` and `top` do. Knows the broker and the settings, no MLX."""
