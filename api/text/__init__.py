"""Text to tokens and back: chat templates, tokenizers, detokenizing."""
