"""A lane without a model, for tests and drills: the scripted engine, with a tokenizer whose tokens are single bytes.

The ids it plays are the printable ASCII characters, so that every completion is a readable text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from broker.text.token_bytes import byte_level_alphabet
from mtplx_core.engine import Engine, Geometry, Row
from mtplx_core.engines.scripted import Script, ScriptedEngine, ScriptedFault, sleeping_pace
from workers.config import ScriptConfig
from workers.lane import ServedModel

NAME = "scripted"
IDENTITY = "scripted@000000000000"
END, TURN = "<|end|>", "<|turn|>"
EOS_TOKEN_ID = 0
_SPECIAL = (END, TURN)
_PRINTABLE = range(0x20, 0x7F)
_BYTES = (*(byte for byte in range(256) if byte not in _PRINTABLE), *_PRINTABLE)
"""Bytes by token id, the first after the special tokens; printable ones last."""

VOCAB_SIZE = len(_SPECIAL) + len(_BYTES)
FIRST_PLAYED = VOCAB_SIZE - len(_PRINTABLE)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


class ScriptedLane:
    """A lane source that plays a script."""

    memory_bytes = 0
    mode = None
    refusals: Mapping[str, str] = {}

    def __init__(self, config: ScriptConfig, geometry: Geometry) -> None:
        self._config = config
        self._geometry = geometry

    def describe(self) -> ServedModel:
        return ServedModel(
            identity=IDENTITY,
            name=NAME,
            family=NAME,
            vocab_size=VOCAB_SIZE,
            max_context_tokens=self._geometry.max_context_tokens,
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
            tokenizer_files=tokenizer_files(),
        )

    def build(self) -> Engine:
        script, hold = self._config, self._config.hold
        is_held = hold.exists if hold is not None else lambda: False
        pace = sleeping_pace(script.step_s, prefill_token_s=script.prefill_token_s, is_held=is_held)
        return ScriptedEngine(self._geometry, script_of(script), pace=pace)

    def release(self) -> None:
        """There is nothing to let go of."""


def script_of(config: ScriptConfig) -> Script:
    """The script behind a config; with it `scripted_completion` says what a client must see."""
    planned = (
        ScriptedFault("crash", 0, strikes=_Holds(config.crash_text)) if config.crash_text else None,
        ScriptedFault("dead", 0, strikes=_Holds(config.dead_text)) if config.dead_text else None,
    )
    return Script(
        vocab_size=VOCAB_SIZE,
        first_token=FIRST_PLAYED,
        tokens_per_step=config.tokens_per_step,
        eos_token_id=EOS_TOKEN_ID,
        eos_position=lambda prompt: config.eos_position,
        faults=tuple(fault for fault in planned if fault is not None),
    )


def encode_text(text: str) -> tuple[int, ...]:
    """Text as this lane's tokenizer would have it, special tokens aside."""
    ids = {byte: len(_SPECIAL) + index for index, byte in enumerate(_BYTES)}
    return tuple(ids[byte] for byte in text.encode())


def tokenizer_files() -> dict[str, bytes]:
    """A byte-level tokenizer without merges, in the files that API processes read."""
    characters = {byte: character for character, byte in byte_level_alphabet().items()}
    vocab = {token: index for index, token in enumerate(_SPECIAL)}
    vocab |= {characters[byte]: len(_SPECIAL) + index for index, byte in enumerate(_BYTES)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(index, token) for index, token in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": []},
    }  # fmt: skip
    settings = {"eos_token": END, "chat_template": _CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": json.dumps(tokenizer).encode(), "tokenizer_config.json": json.dumps(settings).encode()}


class _Holds:
    """Whether a row's prompt holds a text."""

    def __init__(self, text: str) -> None:
        self._tokens = encode_text(text)

    def __call__(self, row: Row) -> bool:
        size = len(self._tokens)
        return any(row.prompt[start : start + size] == self._tokens for start in range(len(row.prompt) - size + 1))


def _added(index: int, token: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, "special": True, **flags}
