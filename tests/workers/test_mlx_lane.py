"""A worker over real engines. Engine: tiny random llama; Redis: fakeredis."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from broker.registry import Registry
from broker.scripts import DEFAULT_BOUNDS, Scripts, Submission
from broker.wire import Request, Sampling, SamplingDefaults, Ticket, pack_tokens
from harness.models import EOS_TOKEN_ID, write_tiny_llama, write_tiny_mamba
from harness.reads import read_log, read_status
from harness.wait import PATIENCE_S
from mtplx_core.engine import Geometry, Row, SamplingParams, SchedulerMode
from mtplx_core.engines.serial import SerialEngine
from mtplx_core.errors import ModelLoadError, UnsupportedModeError
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.heads.base import Head
from mtplx_core.models.loader import LoadedModel, load_model
from mtplx_core.models.trunk import Trunk
from mtplx_core.mtp import assemble
from mtplx_core.sampling.audit import audit
from tests.mtplx_core.driving import run
from tests.workers.rig import FragileServer
from workers.config import WorkerConfig
from workers.daemon import Links, Worker
from workers.errors import LaneError
from workers.mlx_lane import MlxLane

PROMPT = (70, 71, 72, 73)
CONFIG = WorkerConfig(redis_url="unused", name="w", decode_batch_max=2, max_context_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@asynccontextmanager
async def loaded(server: FragileServer, config: WorkerConfig) -> AsyncIterator[Worker]:
    """A worker that has loaded its model; closed with its connections."""
    links = Links(server.client(), server.client(blocking=True))
    worker = Worker(config, MlxLane(config), links)
    worker.service.start()
    try:
        await worker.enlist()
        await worker.load()
        yield worker
    finally:
        await worker.close()
        await links.close()


async def decode(server: FragileServer, worker: Worker, *requests: Request) -> None:
    """Bring requests through the worker, as the former would send them."""
    scripts = Scripts(server.client())
    for request in requests:
        ticket = Ticket(request.id, request.model, request.profile, len(PROMPT), request.max_tokens, "interactive")
        await scripts.accept(Submission(request, ticket, seed=11), DEFAULT_BOUNDS)
    await scripts.form(worker.membership.id, "c1", [request.id for request in requests])
    await worker.take_jobs(block_ms=None)
    async with asyncio.timeout(PATIENCE_S):
        while len(worker.committer.rows):
            await worker.committer.wait_until_wanted()
            await worker.committer.step()


async def identity_of(server: FragileServer) -> str:
    [record] = await Registry(server.client()).workers()
    assert record.lane is not None
    return record.lane.model


@pytest.mark.parametrize("mode", [SchedulerMode.SERIAL, SchedulerMode.AR_BATCH, SchedulerMode.MTP_BATCH])
async def test_worker_decodes_what_the_model_says(fragile: FragileServer, folder: Path, mode: SchedulerMode) -> None:
    async with loaded(fragile, replace(CONFIG, model=str(folder), mode=mode)) as worker:
        model = await identity_of(fragile)
        request = Request("a", model, "balanced", pack_tokens(PROMPT), 12, Sampling(temperature=0.8), ignore_eos=True)

        await decode(fragile, worker, request)

    client = fragile.client()
    tokens = await read_log(client, "a")
    assert len(tokens) == 12
    assert audit(load_model(folder).model, PROMPT, tokens, SamplingParams(temperature=0.8, seed=11)).passed
    assert await read_status(client, "a") == "finished"


async def test_worker_decodes_rows_together(fragile: FragileServer, folder: Path) -> None:
    async with loaded(fragile, replace(CONFIG, model=str(folder))) as worker:
        model = await identity_of(fragile)
        greedy = Request("a", model, "balanced", pack_tokens(PROMPT), 12, Sampling(temperature=0.0), ignore_eos=True)
        sampled = Request("b", model, "balanced", pack_tokens(PROMPT), 12, Sampling(temperature=1.2), ignore_eos=True)

        await decode(fragile, worker, greedy, sampled)

    client = fragile.client()
    plain = load_model(folder).model
    assert audit(plain, PROMPT, await read_log(client, "a"), SamplingParams()).passed
    assert audit(plain, PROMPT, await read_log(client, "b"), SamplingParams(temperature=1.2, seed=11)).passed


async def test_worker_says_what_its_model_is(fragile: FragileServer, folder: Path) -> None:
    async with loaded(fragile, replace(CONFIG, model=str(folder), max_context_tokens=100_000)):
        registry = Registry(fragile.client())
        [record] = await registry.workers()
        [card] = (await registry.cards()).values()

        assert record.lane is not None
        assert record.lane.route == "llama_mtp_batch_b2_t8"
        assert record.lane.max_context_tokens == card.max_context_tokens == 1024
        assert card.name == "tiny-llama"
        assert "tokenizer.json" in await registry.tokenizer_files(card.tokenizer)


@pytest.mark.parametrize("mode", [SchedulerMode.SERIAL, SchedulerMode.AR_BATCH, SchedulerMode.MTP_BATCH])
async def test_end_token_of_the_generation_config_ends_a_row_once_it_may(
    fragile: FragileServer, folder: Path, tmp_path: Path, mode: SchedulerMode
) -> None:
    greedy = Row("row", PROMPT, 12, ignore_eos=True)
    [first, *_] = run(SerialEngine(load_model(folder), Geometry()), [greedy]).tokens["row"]
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [first], "temperature": 0.5}))

    async with loaded(fragile, replace(CONFIG, model=str(other), mode=mode)) as worker:
        model = await identity_of(fragile)
        [card] = (await Registry(fragile.client()).cards()).values()
        asked = Request("a", model, "balanced", pack_tokens(PROMPT), 12, Sampling(temperature=0.0))
        # Each by itself, since the serial lane has one row.
        await decode(fragile, worker, asked)
        await decode(fragile, worker, structs.replace(asked, id="b", min_tokens=3))

    client = fragile.client()
    assert set(card.eos_token_ids) == {EOS_TOKEN_ID, first}
    assert card.defaults == SamplingDefaults(temperature=0.5)
    assert await read_log(client, "a") == (first,)
    barred = await read_log(client, "b")
    assert {first, EOS_TOKEN_ID}.isdisjoint(barred[:3])
    assert len(barred) >= 3


async def test_worker_falls_to_the_mode_that_says_what_its_model_says_and_names_what_it_refused(
    fragile: FragileServer, tmp_path: Path
) -> None:
    """Mamba's states cannot be rewound, and mlx-lm's own batch feeds them the padding of rows that join."""
    async with loaded(fragile, replace(CONFIG, model=str(write_tiny_mamba(tmp_path / "states")))) as worker:
        await worker.beat()
        [record] = await Registry(fragile.client()).workers()

    assert record.lane is not None
    assert record.lane.mode == "serial"
    assert "_serial_b1_" in record.lane.route
    snapshot = json.loads(record.fields["snapshot"])
    assert "ArraysCache" in snapshot["mtp_batch_refused"]
    assert "log-probabilities" in snapshot["ar_batch_refused"]


@pytest.mark.parametrize("mode", [SchedulerMode.AR_BATCH, SchedulerMode.MTP_BATCH])
async def test_worker_ends_with_the_reason_when_the_mode_it_was_asked_for_says_something_else(
    fragile: FragileServer, tmp_path: Path, mode: SchedulerMode
) -> None:
    asked = replace(CONFIG, model=str(write_tiny_mamba(tmp_path / "states")), mode=mode)

    with pytest.raises(UnsupportedModeError, match=mode.value):
        async with loaded(fragile, asked):
            pass


async def test_worker_decodes_windows_with_drafts(fragile: FragileServer, folder: Path, tmp_path: Path) -> None:
    windowed = Path(shutil.copytree(folder, tmp_path / "windowed"))
    description = json.loads((windowed / "config.json").read_text())
    kinds = ["sliding_attention"] * (description["num_hidden_layers"] - 1) + ["full_attention"]
    (windowed / "config.json").write_text(json.dumps({**description, "layer_types": kinds, "sliding_window": 16}))

    async with loaded(fragile, replace(CONFIG, model=str(windowed))):
        [record] = await Registry(fragile.client()).workers()

    assert record.lane is not None
    assert record.lane.mode == "mtp_batch"


@pytest.mark.parametrize(("asked", "depth"), [(None, 7), (1, 1), (0, 0)])
async def test_lane_drafts_deeper_than_its_head_was_made_for_unless_it_is_told(
    fragile: FragileServer, folder: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, depth: int
) -> None:
    def made_for_three(_: Path | None, model: LoadedModel) -> Head:
        return AttachedHead(Trunk(model.model), list(range(model.vocab_size)), max_depth=3)

    monkeypatch.setattr(assemble, "find_head", made_for_three)

    async with loaded(fragile, replace(CONFIG, model=str(folder), depth=asked)):
        [record] = await Registry(fragile.client()).workers()

    assert record.lane is not None
    assert (record.lane.depth, record.lane.route) == (depth, f"llama_mtp_batch_b2_t{depth + 1}")


@pytest.mark.parametrize(("asked", "is_served"), [(None, True), (SchedulerMode.MTP_BATCH, False)])
def test_model_with_a_useless_head_of_its_own_is_served_unless_drafting_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: SchedulerMode | None, is_served: bool
) -> None:
    def useless(_: Path | None, model: LoadedModel) -> Head:
        raise ModelLoadError("agrees on 1 %")

    monkeypatch.setattr(assemble, "find_head", useless)
    lane = MlxLane(replace(CONFIG, model=str(folder), mode=asked))
    lane.describe()

    with nullcontext() if is_served else pytest.raises(ModelLoadError, match="1 %"):
        assert lane.build().snapshot()["head"] is None


def test_lane_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        MlxLane(replace(CONFIG, model=str(tmp_path / "nowhere"))).describe()


def test_lane_says_what_to_do_when_the_default_model_was_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="mtplx fetch"):
        MlxLane(replace(CONFIG, cache_dir=tmp_path)).describe()


def test_lane_needs_a_model_or_a_cache_directory() -> None:
    with pytest.raises(LaneError, match="cache_dir"):
        MlxLane(CONFIG).describe()


async def test_worker_offers_no_more_rows_than_its_memory_carries_and_says_so(
    fragile: FragileServer, folder: Path
) -> None:
    config = replace(CONFIG, model=str(folder), decode_batch_max=8, max_context_tokens=1024, memory_bytes=4_000_000)
    async with loaded(fragile, config) as worker:
        await worker.beat()

        [record] = await Registry(fragile.client()).workers()

    assert record.lane is not None
    told = json.loads(record.fields["snapshot"])["memory"]
    assert record.lane.decode_batch_max == record.free_rows == told["rows_carried"] < told["rows_asked"] == 8
    assert told["rows_carried"] * told["row_bytes"] <= told["limit_bytes"] == 4_000_000
