"""Every family with sliding windows in a batch of unequal rows, against the same rows alone. Tiny random models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import afm7, gemma3n, llama4
from mlx_lm.models.cache import KVCache, RotatingKVCache

from harness.windowed import FAMILIES, VOCAB_SIZE, WINDOW, WRAPPED, windowed, windowed_model
from mtplx_core.build import choose_mode
from mtplx_core.caches.attention import attend
from mtplx_core.errors import UnsupportedModeError
from mtplx_core.models.trunk import Trunk, unsupported_reason
from mtplx_core.mtp.device_batch import new_trunk_cache

AT_ODDS_WITH_ITSELF = "plamo3"
"""mlx-lm's mask of its window is one longer than the cache that the window is kept in."""
STARTS = (3, 20, 41)
TOKENS = 64
POSITIONS = 4


def largest(array: mx.array) -> float:
    return float(np.abs(np.array(array)).max())


def prefilled(trunk: Trunk, ids: mx.array, tokens: int) -> list[Any]:
    """A row of mlx-lm's, fed in chunks of several sizes."""
    caches, fed = trunk.new_caches(), 0
    for chunk in (2, 1, 17, 1, 1, 30):
        end = min(fed + chunk, tokens)
        if end > fed:
            trunk.hidden(ids[:, fed:end], caches)
        fed = end
    return caches


@pytest.mark.parametrize("family", [name for name in (*FAMILIES, *WRAPPED) if name != AT_ODDS_WITH_ITSELF])
def test_rows_of_any_age_say_what_each_says_alone_whatever_is_rejected(family: str) -> None:
    trunk, rng = Trunk(windowed_model(family)), np.random.default_rng(5)
    ids = mx.array(rng.integers(0, VOCAB_SIZE, size=(len(STARTS), TOKENS)).astype(np.int32))
    alone = trunk.hidden(ids)
    cache = new_trunk_cache(trunk, max_positions=POSITIONS)
    cache.reserve(len(STARTS), TOKENS)
    for row, start in enumerate(STARTS):
        cache.insert(row, prefilled(trunk, ids[row : row + 1], start))
    lengths, worst = list(STARTS), 0.0

    while max(lengths) + POSITIONS <= TOKENS:
        positions = int(rng.integers(1, POSITIONS + 1))
        kept = rng.integers(0, positions + 1, size=len(STARTS))
        offset = mx.array(lengths, mx.int32)
        right = mx.take_along_axis(ids, offset[:, None] + mx.arange(positions), axis=1)
        is_right = mx.arange(positions) < mx.array(kept.astype(np.int32))[:, None]
        fed = mx.where(is_right, right, (right + 7) % VOCAB_SIZE)
        cache.begin(
            offset, positions, longest=max(lengths) + positions, lengths=[length + positions for length in lengths]
        )
        hidden = trunk.hidden(fed, cache.layers)
        for row, count in enumerate(kept.tolist()):
            if count:
                at = lengths[row]
                worst = max(worst, largest(hidden[row, :count] - alone[row, at : at + count]))
            lengths[row] += count

    assert lengths[0] > 2 * WINDOW
    assert worst < 1e-5 * largest(alone)
    # mlx-lm makes plain caches for Mistral 3, of which only a window is shown.
    assert any(layer.shape.window == WINDOW for layer in cache.attention) == (family != "mistral3")


def test_family_that_is_at_odds_with_itself_runs_in_no_mode() -> None:
    with pytest.raises(UnsupportedModeError, match="serial"):
        choose_mode(windowed(AT_ODDS_WITH_ITSELF))


def test_families_cross_the_window_with_attention_sinks_and_with_other_heads_in_windowed_layers() -> None:
    for family in ("gpt_oss", "mimo_v2_flash", "step3p5", "laguna"):
        attention = windowed_model(family).layers[0].self_attn
        keys = attention.k_proj.weight.shape[0]
        assert attention.q_proj.weight.shape[0] > keys
    assert largest(windowed_model("gpt_oss").layers[0].self_attn.sinks) > 0
    assert windowed_model("mimo_v2_flash").layers[0].self_attn.attention_sink_bias is not None


@pytest.mark.parametrize("heads", [2, 6], ids=["every-head-has-keys", "heads-share-keys"])
@pytest.mark.parametrize("positions", [1, 3])
def test_attention_with_sinks_gives_what_mlx_gives(heads: int, positions: int) -> None:
    trunk = Trunk(windowed_model("gpt_oss"))
    cache = new_trunk_cache(trunk, max_positions=POSITIONS)
    cache.reserve(len(STARTS), TOKENS)
    cache.begin(mx.array(STARTS, mx.int32), positions, longest=45, lengths=[7, 24, 45])
    layer = cache.attention[0]
    keys, values, queries = (
        mx.random.normal((len(STARTS), count, places, 12), key=mx.random.key(count + places))
        for count, places in ((2, layer.view.attended), (2, layer.view.attended), (heads, positions))
    )
    mask, sinks = layer.make_mask(positions, window_size=WINDOW), mx.random.normal((heads,), key=mx.random.key(3))

    ours = attend(queries, keys, values, layer, 0.3, mask, sinks)

    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask, sinks=sinks)
    plain = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    assert mx.allclose(ours, theirs, atol=1e-5)
    assert not mx.allclose(ours, plain, atol=1e-3)


def test_layer_that_attends_to_the_keys_of_another_one_is_cut_by_the_mask_it_brings() -> None:
    lengths = (500, 20, 300)
    cache = new_trunk_cache(Trunk(windowed_model("gpt_oss")), max_positions=POSITIONS)
    cache.reserve(len(lengths), max(lengths))
    cache.begin(mx.array(lengths, mx.int32) - 1, 1, longest=max(lengths), lengths=lengths)
    windowed, full = cache.attention[:2]
    places = full.view.attended
    keys, values = (mx.random.normal((len(lengths), 2, places, 12), key=mx.random.key(key)) for key in (1, 2))
    queries, mask = mx.random.normal((len(lengths), 4, 1, 12), key=mx.random.key(5)), full.make_mask(1)

    ours = attend(queries, keys, values, windowed, 0.3, mask)

    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    assert windowed.view.attended < places
    assert mx.allclose(ours, theirs, atol=1e-5)


def refusal(caches: list[Any], layers: int) -> str:
    class Stub:
        def __init__(self) -> None:
            self.layers = [object()] * layers

        def make_cache(self) -> list[Any]:
            return caches

    return unsupported_reason(Stub()) or ""


def test_rotating_cache_that_keeps_first_tokens_is_refused() -> None:
    rotating: Any = RotatingKVCache(max_size=8, keep=4)  # type: ignore[no-untyped-call]  # mlx-lm carries no types

    assert "RotatingKVCache that keeps no first tokens" in refusal([rotating], 1)


def test_layers_that_share_caches_are_refused_in_families_that_are_not_known() -> None:
    plain: Any = KVCache()  # type: ignore[no-untyped-call]  # mlx-lm carries no types

    assert "2 layers share 1 caches" in refusal([plain], 2)


def test_layers_that_share_caches_are_carried_where_they_take_offset_and_mask_of_the_forward() -> None:
    model = windowed_model("gemma4_text")

    assert len(model.layers) > len(model.make_cache())
    assert unsupported_reason(model) is None


def small(module: Any, **config: Any) -> Any:
    """A model that is only asked for its layers and caches."""
    return module.Model(module.ModelArgs.from_dict({"model_type": module.__name__.rpartition(".")[2], **config}))


_TEXT = {
    "head_dim": 12,
    "hidden_size": 48,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "model_type": "text",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
}


def test_chunked_attention_is_refused_with_the_reason() -> None:
    own = {
        "attention_bias": False,
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 32,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
    }

    assert "ChunkedKVCache" in (unsupported_reason(small(llama4, text_config={**_TEXT, **own})) or "")


def test_layers_that_take_positions_from_the_length_of_shared_keys_are_refused() -> None:
    sizes = {"hidden_dim": 48, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2}

    assert "4 layers share 2 caches" in (unsupported_reason(small(afm7, vocab_size=VOCAB_SIZE, **sizes)) or "")


def test_model_that_gives_no_hidden_states_is_refused() -> None:
    own = {
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_num_inputs": 2,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "rope_local_base_freq": 1000.0,
        "sliding_window": WINDOW,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    }

    assert "layers share 2 caches" in (unsupported_reason(small(gemma3n, text_config={**_TEXT, **own})) or "")
