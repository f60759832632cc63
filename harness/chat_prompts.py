"""The prompt tokens an API host makes of a question, for auditing what came back."""

from __future__ import annotations

import json

import jinja2
from tokenizers import Tokenizer

from mtplx_core.models.loader import LoadedModel


def chat_prompt(loaded: LoadedModel, question: str) -> tuple[int, ...]:
    """From the files that travel to API hosts alone."""
    config = json.loads(loaded.tokenizer_files["tokenizer_config.json"])
    messages = [{"role": "user", "content": question}]
    text = jinja2.Template(config["chat_template"]).render(messages=messages, add_generation_prompt=True)
    tokenizer = Tokenizer.from_buffer(loaded.tokenizer_files["tokenizer.json"])
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
