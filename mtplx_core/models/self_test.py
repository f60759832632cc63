"""Whether an engine says what its model says: a few short rows decoded, and every number compared with the model's own.

Greedy text hides a wrong scale, and a wrong mask raises nothing, so log-probabilities are compared: of rows of
different lengths, several positions each, fed in chunks and joining while others run. It runs before a lane serves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mtplx_core.engine import Engine, Row, RowTokens
from mtplx_core.models.loader import LoadedModel
from mtplx_core.models.own_call import logits_in_one_forward

logger = logging.getLogger(__name__)

ROWS = 3
"""Decoded together; a mask that meets the wrong axis may fit by chance where there are as few rows as key heads."""
CHUNK_TOKENS = 16
DEPTH = 2
CONTEXT_TOKENS = 64
_PROMPT_TOKENS = (3, 19, 9, 30)
"""Of rows that are padded to one another, of one chunk and of several; the last two join while others run."""
_SAID_TOKENS = 3
_TOP = 4
_FLOAT32_LIMIT = 1e-3
_HALF_LIMIT = 2e-2
"""As a share of the largest logit. In half precision other sums are taken when rows are decoded together."""

Floats = npt.NDArray[np.float64]


def refusal(engine: Engine, loaded: LoadedModel) -> str:
    """Why this engine must not serve this model; empty where it says what the model says.

    Args:
        engine: nothing runs on it yet. It is left as empty as it came.
    """
    rows = [_row(place, loaded.vocab_size) for place in range(len(_PROMPT_TOKENS))]
    try:
        said = _decode(engine, rows)
    except Exception as error:  # a family that the engine does not fit may fail in any way
        logger.info("the self-test raised", exc_info=True)
        return f"decoding a few short rows fails ({type(error).__name__}: {_first_line(error)})"
    finally:
        engine.close()
    apart = max(_distance(loaded, row, said[row.row_id]) for row in rows)
    limit = _FLOAT32_LIMIT if loaded.dtype == mx.float32 else _HALF_LIMIT
    if apart <= limit:
        return ""
    return f"its log-probabilities lie {apart:.1%} of the largest logit from the model's own, {limit:.1%} is rounding"


def _row(place: int, vocab_size: int) -> Row:
    """Tokens that repeat themselves, so that lookup finds drafts."""
    period = 2 + place
    tokens = ((7 * (at % period) + 11 * place + 1) % vocab_size for at in range(_PROMPT_TOKENS[place]))
    return Row(f"self-test-{place}", tuple(tokens), _SAID_TOKENS, ignore_eos=True, top_logprobs=_TOP)


def _decode(engine: Engine, rows: Sequence[Row]) -> dict[str, list[RowTokens]]:
    """What the engine says of each row. A place is left free until others have said something."""
    waiting, said = list(rows), dict[str, list[RowTokens]]()
    while waiting or engine.active_rows:
        most = engine.geometry.decode_batch_max if said else engine.geometry.decode_batch_max - 1
        while waiting and engine.active_rows < max(most, 1):
            engine.admit(waiting.pop(0))
        result = engine.step()
        for tokens in result.tokens:
            said.setdefault(tokens.row_id, []).append(tokens)
        for end in result.ends:
            if end.reason == "error":
                raise RuntimeError(end.message)
    return said


def _distance(loaded: LoadedModel, row: Row, said: Sequence[RowTokens]) -> float:
    """How far the row's log-probabilities are from the model's own, as a share of the largest logit.

    In float32 the worst one counts. In half precision the median does: a mixture's router may take another expert at
    a position or two, whereas a wrong scale or mask moves all of them.
    """
    answer = [token for tokens in said for token in tokens.tokens]
    logits = logits_in_one_forward(loaded.model, mx.array([[*row.prompt, *answer[:-1]]]))
    logits = logits[0, len(row.prompt) - 1 :].astype(mx.float32)
    own: Floats = np.array(logits, np.float64)  # (positions, vocabulary)
    largest = max(float(np.abs(own[np.isfinite(own)]).max()), 1.0)
    own = own - np.logaddexp.reduce(own, axis=-1, keepdims=True)
    gaps = [abs(own[position, token] - logprob) for position, token, logprob in _logprobs(said)]
    gaps += [own[position].max() - own[position, token] for position, token in enumerate(answer)]
    apart = max(gaps) if loaded.dtype == mx.float32 else float(np.median(gaps))
    return float("inf") if np.isnan(gaps).any() else float(apart) / largest


def _logprobs(said: Sequence[RowTokens]) -> Iterator[tuple[int, int, float]]:
    """(position, token, log-probability) of everything a row was told."""
    for tokens in said:
        assert tokens.logprobs is not None
        for place, (token, detail) in enumerate(zip(tokens.tokens, tokens.logprobs, strict=True), tokens.position):
            yield place, token, detail.logprob
            yield from ((place, other, logprob) for other, logprob in detail.top)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
