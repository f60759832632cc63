"""The trained checkpoint in Qwen3.5's layout, its head included: what is read, drafted, committed and continued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from tokenizers import Tokenizer

from mtplx_core.build import build_engine
from mtplx_core.engine import Engine, Geometry, Row, SamplingParams, SchedulerMode
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.heads.native import load_native_head, stored_head
from mtplx_core.heads.norms import Convention
from mtplx_core.heads.qwen import NORMS, QwenHead, StoredQwenHead
from mtplx_core.heads.tensors import load_files
from mtplx_core.heads.usefulness import measure_agreement, own_text
from mtplx_core.models.loader import LoadedModel, load_model
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp.assemble import build_mtp_engine, find_head
from mtplx_core.sampling.audit import audit, compare
from tests.mtplx_core.driving import Heard, run
from tests.mtplx_core.heads.layouts import quantised

FOLDER = Path(__file__).resolve().parents[3] / "checkpoints" / "qwen3.5-tiny"
GEOMETRY = Geometry(decode_batch_max=4, max_context_tokens=400, depth=2, prefill_chunk_tokens=64)
QUESTIONS = (
    "Where is the red kettle?",
    "Tell me a story about Ada.",
    "Write a list of things in the old barn.",
    "Who has the violin? Tell me a story about Peter, and how many lanterns are there?",
    "Hm?",
    "What does Rosa do on Sunday?",
)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def trunk(loaded: LoadedModel) -> Trunk:
    return Trunk(loaded.model)


@pytest.fixture(scope="module")
def head(loaded: LoadedModel) -> QwenHead:
    found = find_head(None, loaded)
    assert isinstance(found, QwenHead)
    return found


@pytest.fixture
def build(loaded: LoadedModel, head: QwenHead) -> Iterator[Callable[[], Engine]]:
    made: list[Engine] = []

    def new() -> Engine:
        made.append(build_engine(SchedulerMode.MTP_BATCH, loaded, geometry=GEOMETRY, head=head))
        return made[-1]

    yield new
    for engine in made:
        engine.close()


def rows_of(loaded: LoadedModel, sampling: SamplingParams) -> list[Row]:
    """Questions of 8 to 90 tokens, as the chat template would put them."""
    return [
        Row(f"r{index}", prompt_of(question), 24 + 5 * index, replace(sampling, seed=index), ignore_eos=True)
        for index, question in enumerate(QUESTIONS)
    ]


def prompt_of(question: str) -> tuple[int, ...]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text).ids)


def joining(engine: Engine, rows: list[Row]) -> Heard:
    """Four rows at most; the next joins whenever one has left."""
    late = iter(rows[3:])

    def join(step: int) -> None:
        if engine.active_rows < GEOMETRY.decode_batch_max and step % 5 == 4 and (row := next(late, None)) is not None:
            engine.admit(row)

    return run(engine, rows[:3], before_step=join)


def test_checkpoint_is_small_and_shaped_like_the_large_ones(loaded: LoadedModel) -> None:
    described = loaded.config["text_config"]

    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4_000_000
    assert (described["linear_key_head_dim"], described["linear_value_head_dim"]) == (128, 128)
    assert described["linear_conv_kernel_dim"] == 4


def test_head_is_read_as_it_was_written(loaded: LoadedModel, trunk: Trunk) -> None:
    native = load_native_head(loaded, trunk)

    assert native is not None
    assert native.convention == "read off each norm"
    assert 0.5 < native.agreement < 1.0


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "seeded"])
def test_joining_and_leaving_rows_say_what_serial_says_with_some_drafts_accepted(
    loaded: LoadedModel, build: Callable[[], Engine], sampling: SamplingParams
) -> None:
    engine, rows = build(), rows_of(loaded, sampling)

    heard = joining(engine, rows)

    for row in rows:
        result = audit(loaded.model, row.prompt, heard.tokens[row.row_id], row.sampling)
        assert result.passed, (row.row_id, result)
        assert len(heard.tokens[row.row_id]) == row.max_tokens
    drafted = engine.snapshot()["drafters"]["head"]
    assert 0 < drafted["right"] < drafted["tried"]


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "seeded"])
def test_rows_of_a_killed_worker_go_on_as_serial_would(
    loaded: LoadedModel, build: Callable[[], Engine], sampling: SamplingParams
) -> None:
    rows, first = rows_of(loaded, sampling)[:3], build()
    committed: dict[str, list[int]] = {row.row_id: [] for row in rows}
    for row in rows:
        first.admit(row)
    while min(map(len, committed.values())) < 12:
        for part in first.step().tokens:
            committed[part.row_id] += part.tokens

    left = [replace(row, committed=tuple(committed[row.row_id])) for row in rows]
    heard = run(build(), left)

    plain = run(SerialEngine(loaded, GEOMETRY), [rows[1]]).tokens[rows[1].row_id]
    answer = [*left[1].committed, *heard.tokens[rows[1].row_id]]
    assert compare(loaded.model, rows[1].prompt, plain, answer, rows[1].sampling).passed
    for row in left:
        answer = [*row.committed, *heard.tokens[row.row_id]]
        assert audit(loaded.model, row.prompt, answer, row.sampling).passed


def test_norms_read_wrongly_are_noticed(loaded: LoadedModel, trunk: Trunk, head: QwenHead) -> None:
    stored = StoredQwenHead(trunk, stored_head(load_files(FOLDER), loaded.config), loaded.config)
    text = own_text(trunk)
    right = measure_agreement(trunk, head, text)

    stored.read_as(Convention("as they are", frozenset()))

    assert measure_agreement(trunk, stored.head, text) < right - 0.3
    assert stored.conventions[0].raw == set(NORMS)


def test_reversed_pair_is_noticed(trunk: Trunk, head: QwenHead) -> None:
    text = own_text(trunk)
    right = measure_agreement(trunk, head, text)
    embedding, hidden = mx.split(head.fc.weight, 2, axis=1)
    turned = QwenHead(trunk, has_experts=False)
    turned.update(head.parameters())
    turned.fc.weight = mx.concatenate([hidden, embedding], axis=1)

    assert measure_agreement(trunk, turned, text) < right - 0.3


def test_head_still_drafts_for_a_quantised_trunk() -> None:
    again = load_model(FOLDER)
    quantised(again.model)

    native = load_native_head(again, Trunk(again.model))

    assert native is not None
    assert native.agreement > 0.5


def test_lane_with_its_own_head_is_probed_at_start_and_decodes(loaded: LoadedModel, tmp_path: Path) -> None:
    engine = build_mtp_engine(loaded, GEOMETRY, head=find_head(None, loaded), probe_dir=tmp_path)

    assert len(run(engine, [Row("row", (5, 6, 7), 8, ignore_eos=True)]).tokens["row"]) == 8
