"""Small models for engine tests: a random llama with a byte-level tokenizer, in memory or as a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import mamba
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mtplx_core.models.loader import LoadedModel

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS_TOKEN_ID = 2
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "state_size": 4,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS_TOKEN_ID,
}


def tiny_llama(
    *,
    seed: int = 0,
    eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN_ID}),
    poison_token_id: int | None = None,
) -> LoadedModel:
    """A random llama, float32, the same for the same seed.

    Args:
        poison_token_id: a token whose embedding is not a number; the model has an unembedding of its own then.
    """
    model = random_llama(seed=seed, tied=poison_token_id is None)
    if poison_token_id is not None:
        model.model.embed_tokens.weight[poison_token_id] = mx.nan
    return LoadedModel(
        model=model,
        path=Path("/nonexistent/tiny-llama"),
        name="tiny-llama",
        identity=f"tiny-llama@{seed:012x}",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=eos_token_ids,
        max_context=CONFIG["max_position_embeddings"],
        tokenizer_files={name: text.encode() for name, text in tokenizer_texts().items()},
        config=CONFIG,
        dtype=mx.float32,
    )


def random_llama(*, seed: int, tied: bool = True) -> Any:
    """Weights are wide enough for answers that neither loop at once nor hang on ties."""
    config = {**CONFIG, "tie_word_embeddings": tied}
    model: Any = Model(ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]  # mlx-lm annotates in part
    keys = iter(mx.random.split(mx.random.key(seed), 64))
    model.update(
        tree_map(lambda a: mx.random.normal(a.shape, key=next(keys)) * 0.25 if a.ndim > 1 else a, model.parameters())
    )
    mx.eval(model.parameters())
    return model


def write_tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """Save it in mlx-lm's folder format, tokenizer included."""
    return _written(folder, CONFIG, random_llama(seed=seed))


def write_tiny_mamba(folder: Path) -> Path:
    """Save a random model whose layers keep states that no lane of rows of different lengths can carry."""
    model: Any = mamba.Model(mamba.ModelArgs.from_dict(MAMBA))  # type: ignore[no-untyped-call]  # mlx-lm annotates in part
    return _written(folder, MAMBA, model)


def _written(folder: Path, config: dict[str, Any], model: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in tokenizer_texts().items():
        (folder / name).write_text(text)
    return folder


def tokenizer_texts() -> dict[str, str]:
    """Byte-level, no merges: token 4 + n is a byte, the first four are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config)}
