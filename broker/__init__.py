"""The broker room: wire types, keys, scripts, registry and the cohort former. Redis and MessagePack, no MLX."""
