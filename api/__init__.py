"""The API room: HTTP and SSE, text in and out. Knows tokenizers and templates, but no model weights."""
