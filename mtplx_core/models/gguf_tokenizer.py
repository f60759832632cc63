"""Rebuilds a Hugging Face tokenizer folder from the metadata of a GGUF file.

It knows byte-level BPE as SmolLM's converters write it (each digit split off first, then GPT-2's pattern); any
other kind is refused by name instead of being approximated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mtplx_core.errors import ModelLoadError

PRE_TOKENIZER = "smollm"
CONTROL_TOKEN = 3


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The text of every tokenizer file, by file name.

    Raises:
        ModelLoadError: the file's tokenizer is of a kind not built here.
    """
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", PRE_TOKENIZER):
        raise ModelLoadError(f"the GGUF tokenizer {kind} is not supported; only ('gpt2', {PRE_TOKENIZER!r}) is")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special = [token for token, t in zip(tokens, _ints(metadata["tokenizer.ggml.token_type"]), strict=True) if t == 3]
    names = _special_names(metadata, tokens)
    return {
        "tokenizer.json": _dump(_tokenizer(tokens, metadata["tokenizer.ggml.merges"], special)),
        "tokenizer_config.json": _dump(_tokenizer_config(metadata, names, special)),
        "special_tokens_map.json": _dump({**names, "additional_special_tokens": _chat_marks(names)}),
        "generation_config.json": _dump(
            {f"{n}_token_id": _int(metadata[f"tokenizer.ggml.{g}_token_id"]) for n, g in _SPECIAL_IDS}
        ),
    }


_SPECIAL_IDS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def _tokenizer(tokens: list[str], merges: list[str], special: list[str]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(tokens.index(token), token) for token in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _added_token(index: int, token: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": token, **flags}


def _tokenizer_config(metadata: Mapping[str, Any], names: Mapping[str, str], special: list[str]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    decoder = {str(tokens.index(token)): _added_token(tokens.index(token), token) for token in special}
    for entry in decoder.values():
        del entry["id"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": _chat_marks(names),
        **names,
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": _int(metadata["llama.context_length"]),
    }


def _special_names(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    ids = {**dict(_SPECIAL_IDS), "unk": "unknown"}
    return {f"{name}_token": tokens[_int(metadata[f"tokenizer.ggml.{key}_token_id"])] for name, key in ids.items()}


def _chat_marks(names: Mapping[str, str]) -> list[str]:
    return [names["bos_token"], names["eos_token"]]


def _int(value: Any) -> int:
    return int(value.item()) if hasattr(value, "item") else int(value)


def _ints(value: Any) -> list[int]:
    return [int(v) for v in (value.tolist() if hasattr(value, "tolist") else value)]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
