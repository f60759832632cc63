"""Trains `checkpoints/qwen3.5-tiny`: a Qwen3.5 text model of under a million weights, with the head inside it.

`python -m checkpoints.qwen35_tiny [--steps N] [--into FOLDER]`, some minutes on two cores. Written as Qwen3.5 is
published: unconverted names and convolutions, norms less one, `mtp.*` beside the rest. Key and value heads are of size
128 behind a convolution of 4, as in the large ones, so that a GPU runs the same kernels on it.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mtplx_core.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402  # the matrix product is chosen before it
import mlx.nn  # noqa: E402
import mlx.optimizers  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import qwen3_5  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from checkpoints.corpus import conversation  # noqa: E402
from checkpoints.parallel_delta import parallel_delta_update  # noqa: E402
from mtplx_core.caches.rebinding import rebound  # noqa: E402
from mtplx_core.heads.qwen import NORMS, QwenHead  # noqa: E402
from mtplx_core.heads.usefulness import measure_agreement, own_text  # noqa: E402
from mtplx_core.models.trunk import Trunk  # noqa: E402

nn: Any = mlx.nn
optim: Any = mlx.optimizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256 + len(SPECIAL_TOKENS),
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
    },
}
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "dtype": "float32",
    "text_config": TEXT_CONFIG,
}

ROWS, POSITIONS = 8, 192
PEAK_RATE, WARM_UP = 3e-3, 30
HEAD_WEIGHT = 0.3
"""Of the head's loss; it also reaches the trunk, as where such models are trained."""
_TRUNK_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
"""Stored less one; the norm inside a gated delta net is not."""


class Pair(nn.Module):  # type: ignore[misc]  # mlx.nn carries no types
    """A trunk and its head, trained together."""

    def __init__(self) -> None:
        super().__init__()
        family: Any = qwen3_5
        self.trunk_model = family.Model(family.ModelArgs.from_dict(json.loads(json.dumps(CONFIG))))
        self._trunk = Trunk(self.trunk_model)
        for layer in self.trunk_model.layers:
            if layer.is_linear:
                _speed_up(layer.linear_attn)
        self.head = QwenHead(self._trunk, has_experts=False)

    def losses(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Of the trunk and of the head, on (rows, positions + 1) tokens."""
        hidden = self._trunk.hidden(tokens[:, :-1])
        said = self._trunk.logits(hidden)
        drafted = self.head.logits(self.head(hidden[:, :-1], tokens[:, 1:-1]))
        cross_entropy = nn.losses.cross_entropy
        return cross_entropy(said, tokens[:, 1:]).mean(), cross_entropy(drafted, tokens[:, 2:]).mean()


@click.command()
@click.option("--steps", default=160, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--into", type=click.Path(path_type=Path), default=Path(__file__).parent / "qwen3.5-tiny")
def main(*, steps: int, seed: int, into: Path) -> None:
    """Train and write."""
    mx.random.seed(seed)
    tokenizer, pair = byte_tokenizer(), Pair()
    weights: Any = tree_flatten(pair.parameters())
    click.echo(f"{sum(array.size for _, array in weights):,} weights")
    _train(pair, _batches(tokenizer, random.Random(seed)), steps)
    pair.eval()
    text = own_text(pair._trunk)
    click.echo(f"the head drafts {measure_agreement(pair._trunk, pair.head, text):.0%} of the trunk's own text right")
    write(pair, tokenizer, into)


def byte_tokenizer() -> Tokenizer:
    """Bytes behind four special tokens; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write(pair: Pair, tokenizer: Tokenizer, folder: Path) -> None:
    """Save as the family is published."""
    folder.mkdir(parents=True, exist_ok=True)
    trunk: Any = tree_flatten(pair.trunk_model.parameters())
    head: Any = tree_flatten(pair.head.parameters())
    weights = {published_name(name): published(name, array) for name, array in trunk}
    weights |= {f"mtp.{name}": array - 1 if name in NORMS else array for name, array in head}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    click.echo(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 1e6:.2f} MB")


def published_name(name: str) -> str:
    """From mlx-lm's name of a weight to the one it is published under."""
    return name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")


def published(name: str, array: mx.array) -> mx.array:
    """From what mlx-lm computes with to what is stored."""
    if name.endswith("conv1d.weight"):
        return array.moveaxis(2, 1)
    return array - 1 if name.endswith(_TRUNK_NORMS) else array


def _train(pair: Pair, batches: Iterator[mx.array], steps: int) -> None:
    warm = optim.linear_schedule(0.0, PEAK_RATE, WARM_UP)
    cool = optim.cosine_decay(PEAK_RATE, max(steps - WARM_UP, 1), PEAK_RATE / 20)
    optimizer = optim.AdamW(learning_rate=optim.join_schedules([warm, cool], [WARM_UP]), betas=[0.9, 0.98])

    def loss(pair: Pair, tokens: mx.array) -> tuple[mx.array, mx.array]:
        trunk, head = pair.losses(tokens)
        return trunk + HEAD_WEIGHT * head, mx.stack([trunk, head])

    step = nn.value_and_grad(pair, loss)
    started = time.perf_counter()
    for count in range(1, steps + 1):
        (_, parts), gradients = step(pair, next(batches))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(pair, gradients)
        mx.eval(pair.parameters(), optimizer.state, parts)
        if count % 25 == 0 or count == steps:
            bits: Any = (parts / math.log(2)).tolist()
            spent = time.perf_counter() - started
            click.echo(f"step {count}: {bits[0]:.3f} bits a byte, head {bits[1]:.3f}, {spent:.0f} s")


def _batches(tokenizer: Tokenizer, rng: random.Random) -> Iterator[mx.array]:
    """(rows, positions + 1) int32, each row from the beginning of a conversation on."""
    while True:
        rows = []
        for _ in range(ROWS):
            row: list[int] = []
            while len(row) <= POSITIONS:
                row += tokenizer.encode(conversation(rng)).ids
            rows.append(row[: POSITIONS + 1])
        yield mx.array(rows, mx.int32)


def _speed_up(recurrent: Any) -> None:
    """Give a gated delta net a parallel update and a convolution whose gradient a CPU finds quickly."""
    kind, conv_kind = qwen3_5.GatedDeltaNet, nn.Conv1d
    call = rebound(kind.__call__, {"gated_delta_update": parallel_delta_update})
    recurrent.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    recurrent.conv1d.__class__ = type(conv_kind.__name__, (conv_kind,), {"__call__": _convolve})


def _convolve(self: Any, inputs: mx.array) -> mx.array:
    """One channel at a time, (rows, taps - 1 + positions, channels) in; the sum over the taps."""
    taps = self.weight.shape[1]
    positions = inputs.shape[1] - taps + 1
    return sum((inputs[:, tap : tap + positions] * self.weight[:, tap, 0] for tap in range(taps)), mx.array(0.0))


if __name__ == "__main__":
    main()
