"""Why rows of different lengths cannot be padded into one batch of mlx-lm's, where no short self-test would see it."""

from __future__ import annotations

from typing import Any


def padding_refusal(model: Any) -> str:
    """Return the reason, or nothing where padding is harmless as far as is known.

    Sparse attention that picks blocks of keys cuts them over the slots of the cache, so a row's padding moves the
    blocks; that changes nothing before a row has more blocks than are picked, which are thousands of tokens.
    """
    if any(hasattr(module, "index_block_size") for module in model.modules()):
        return "its sparse attention counts blocks of keys from where the padding of a row starts"
    return ""
