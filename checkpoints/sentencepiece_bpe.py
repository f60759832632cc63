"""Rebuilds a Hugging Face tokenizer from the scores of a SentencePiece BPE, as GGUF files of Gemma carry it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SPACE = "▁"
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens in GGUF: those that are no text, and those that are found in text before anything is split."""


def tokenizer_files(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of every tokenizer file, by file name.

    Args:
        fields: a GGUF file's.
    """
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    names = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **names,
        "add_bos_token": True,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer_json(fields, names), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=1),
    }


def tokenizer_json(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer that puts the first token in front of every text."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    bos = names["bos_token"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(index, token, is_special=kind == CONTROL)
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in {CONTROL, USER_DEFINED}
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [fields["tokenizer.ggml.bos_token_id"]], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": names["unk_token"],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges_of(tokens, fields["tokenizer.ggml.scores"]),
        },
    }


def merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    """Return the pairs that SentencePiece joins, best score of the joined token first.

    It joins any two neighbours that make a token, so a token has as many pairs as it can be cut into two tokens.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    order = sorted(range(len(tokens)), key=lambda index: -scores[index])
    return [[left, right] for index in order for left, right in _cuts(tokens[index], ids)]


def _cuts(token: str, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    pairs = ((token[:place], token[place:]) for place in range(1, len(token)))
    known = [(left, right) for left, right in pairs if left in ids and right in ids]
    yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _added(index: int, token: str, *, is_special: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }
