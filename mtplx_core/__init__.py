"""The engine room: models, caches, sampling and the decoding cycle. Token ids in, token ids out."""
