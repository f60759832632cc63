"""Every option of MTPLX, declared once: flag, `MTPLX_` variable, `mtplx.toml` key, type, bounds, default and help.

`load` is the only reader of the environment and of `mtplx.toml`. A flag goes before a variable, a variable before
the file, the file before the batching preset, the preset before the default. What a daemon is given is its own
frozen config, built from this object by the command line.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from console.options import PREFIX, ConfigError, Option, from_environ, from_file, option, options_of

__all__ = ["PRESETS", "ConfigError", "Option", "Preset", "Settings", "as_environ", "load", "options"]

FILE_NAME = "mtplx.toml"
DAY_S = 86_400

SchedulerModeName = Literal["serial", "ar_batch", "mtp_batch"]
PresetName = Literal["latency", "agent", "throughput"]
ProfileName = Literal["balanced", "b1-exact"]
LogLevel = Literal["debug", "info", "warning", "error"]
EngineName = Literal["mlx", "scripted"]
GenerationConfigName = Literal["model", "none"]

UP, API, FORMER, WORKER, FETCH, KEY, LOOK = "up", "api", "former", "worker", "fetch", "key", "look"
BATCH, ASK = "batch-worker", "ask"
"""Who takes an option; `up` takes those of the daemons too, `LOOK` are status, top and doctor, `ASK` are run, batch
and dead."""
DAEMONS = (API, FORMER, WORKER, BATCH)


@dataclass(frozen=True, slots=True)
class Preset:
    """What one word of `batching_preset` stands for."""

    decode_batch_max: int
    batch_wait_ms: int
    prefill_chunk_tokens: int
    offline_share: float


PRESETS: Mapping[str, Preset] = types.MappingProxyType(
    {
        "latency": Preset(decode_batch_max=4, batch_wait_ms=0, prefill_chunk_tokens=256, offline_share=0.5),
        "agent": Preset(decode_batch_max=8, batch_wait_ms=0, prefill_chunk_tokens=512, offline_share=1.0),
        "throughput": Preset(decode_batch_max=16, batch_wait_ms=20, prefill_chunk_tokens=1024, offline_share=1.0),
    }
)
USUAL: PresetName = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All options, resolved and checked."""

    # fmt: off
    redis: str | None = option(
        None, "Redis to use, any redis-py URL; without one, the embedded broker.", *DAEMONS, LOOK, ASK, is_secret=True)
    data_dir: Path | None = option(
        None, "Where the embedded broker keeps its data and its runtime file.", *DAEMONS, LOOK, ASK)
    cache_dir: Path | None = option(None, "Where fetched models are kept.", WORKER, FETCH, LOOK)
    log_level: LogLevel = option("info", "Least level that is logged.", *DAEMONS)

    host: str = option("127.0.0.1", "Address the API listens on.", API, LOOK)
    port: int = option(8000, "Port the API listens on; up takes a free one for 0.", API, LOOK, minimum=0, maximum=65535)
    server: str | None = option(None, "URL of the API to ask; without one, that of this machine.", ASK)
    api_key: str | None = option(None, "API key to ask with.", ASK, is_secret=True)
    keys_file: Path | None = option(None, "TOML file of hashed API keys; without one no key is asked for.", API, KEY)
    allow_open: bool = option(False, "Serve beyond this machine without keys.", API)
    allow_host: tuple[str, ...] = option(
        (), "Name by which a server on loopback without keys is asked too, such as host.docker.internal.", API)
    allow_origin: tuple[str, ...] = option(
        (), "Origin whose web pages may use this server, such as https://app.example; * for every one.", API)
    receive_timeout_s: float = option(
        30.0, "How long a request's head may take to arrive, and how long its body may pause.", API,
        minimum=0.1, maximum=3600)
    keep_alive_s: float = option(
        10.0, "Longest silence on a stream before a comment is sent.", API, minimum=0.1, maximum=15)
    body_limit_bytes: int = option(
        10 << 20, "Largest request body, and line of a batch.", API, BATCH, minimum=1024, maximum=1 << 30)
    default_timeout_s: float = option(
        3600.0, "Deadline of a request that names none.", API, minimum=1, maximum=7 * DAY_S)
    max_timeout_s: float = option(6 * 3600.0, "Latest deadline a request may name.", API, minimum=1, maximum=7 * DAY_S)
    queue_requests_max: int = option(
        10_000, "Interactive requests that wait or run at once, and as many offline ones; beyond it 503.", API,
        minimum=1, maximum=1_000_000)
    queue_tokens_max: int = option(
        50_000_000, "Tokens that they may cost together.", API, minimum=1, maximum=1 << 50)
    retention_s: float = option(
        600.0, "How long an ended request stays readable.", API, minimum=1, maximum=30 * DAY_S)
    detach_s: float = option(
        60.0, "How long a request under an Idempotency-Key outlives its listener.", API, minimum=0.1, maximum=DAY_S)
    lane_grace_s: float = option(
        60.0, "How long a model without a live worker still queues.", API, minimum=0, maximum=DAY_S)
    drain_s: float = option(30.0, "How long open streams may go on after SIGTERM.", API, minimum=0, maximum=3600)
    drain_notice_s: float = option(
        0.0, "How long after SIGTERM health says draining before connections are refused; for a balancer.", API,
        minimum=0, maximum=600)
    redis_connections: int = option(
        32, "Connections to Redis that an API process's calls share; more calls wait their turn.", API,
        minimum=1, maximum=1000)
    registry_age_s: float = option(
        1.0, "How old the API's picture of models and lanes may be.", API, minimum=0, maximum=60)

    file_store: str | None = option(
        None, "Place for contents of files, a directory or a URL that fsspec reads; the data directory without one.",
        API, BATCH)
    file_limit_bytes: int = option(
        200 << 20, "Largest file that can be uploaded.", API, minimum=1024, maximum=1 << 40)
    batch_in_flight: int = option(
        128, "Lines of a batch submitted at once.", BATCH, minimum=1, maximum=100_000)
    batch_lines_max: int = option(50_000, "Most lines of a batch.", BATCH, minimum=1, maximum=100_000_000)
    batch_lease_s: float = option(
        30.0, "How long without a heartbeat before a batch is given to another batch worker.", BATCH,
        minimum=2, maximum=3600)

    workers: int = option(1, "Worker processes.", UP, minimum=0, maximum=64)
    share: bool = option(False, "Let other machines join: the embedded broker also on TCP, with a password.", UP)
    share_host: str | None = option(None, "Address other machines reach this one by; found out by default.", UP)
    share_port: int = option(6380, "TCP port of the shared broker.", UP, minimum=1, maximum=65535)

    model: str | None = option(None, "Model folder or hub id; the fetched default without one.", WORKER, LOOK)
    generation_config: GenerationConfigName = option(
        "model", "What fills in the sampling that a call leaves out: the model's generation_config.json, or nothing.",
        WORKER)
    scheduler_mode: SchedulerModeName | None = option(
        None, "Engine the lane runs on; by itself mtp_batch where the model allows it, else ar_batch.", WORKER)
    profile: ProfileName = option("balanced", "Numerics: rows together, or each row alone.", WORKER)
    batching_preset: PresetName = option(
        USUAL, "Rows, wait, prefill chunk and offline share in one word; each option goes before it.", WORKER, FORMER)
    decode_batch_max: int = option(
        PRESETS[USUAL].decode_batch_max, "Rows decoded together.", WORKER, minimum=1, maximum=256)
    max_context_tokens: int = option(
        2048, "Prompt and completion of one row together.", WORKER, minimum=16, maximum=1 << 20)
    prefill_chunk_tokens: int = option(
        PRESETS[USUAL].prefill_chunk_tokens, "Prompt tokens of a row fed in one forward.", WORKER,
        minimum=16, maximum=1 << 16)
    depth: int | None = option(
        None, "Most tokens drafted per row and cycle, mtp_batch only; by itself 7, or what fused attention takes.",
        WORKER, minimum=0, maximum=8)
    head: Path | None = option(
        None, "Folder of a head that drafts, mtp_batch only; the row's own text drafts without one.", WORKER)
    token_budget: int = option(
        0, "Cache slots of all rows together; 0: derived from memory_bytes.", WORKER, minimum=0, maximum=1 << 40)
    memory_bytes: int = option(
        0, "Memory that caches may take; 0: what this machine has left for them.", WORKER, minimum=0, maximum=1 << 50)
    grace_s: float = option(
        30.0, "How long rows may go on after SIGTERM before they are handed back.", WORKER, minimum=0, maximum=3600)
    lease_s: float = option(
        5.0, "How long without a heartbeat before a daemon is taken for dead.", API, FORMER, WORKER,
        minimum=0.5, maximum=600)
    stall_s: float = option(
        120.0, "How long a step may take before a worker gives itself up.", WORKER, minimum=1, maximum=DAY_S)
    run_ahead_steps: int = option(
        256, "Steps decoded and not yet committed, at most.", WORKER, minimum=1, maximum=1 << 20, is_hidden=True)

    batch_wait_ms: int = option(
        PRESETS[USUAL].batch_wait_ms, "How long a free row may be held for company.", FORMER,
        minimum=0, maximum=10_000)
    offline_share: float = option(
        PRESETS[USUAL].offline_share,
        "Share of a worker's rows up to which offline work that has aged goes before interactive work.", FORMER,
        minimum=0.0, maximum=1.0)
    rows_per_key: int = option(
        0, "Most rows at once per API key; 0: no bound.", FORMER, minimum=0, maximum=1 << 20)
    offline_age_ms: int = option(
        600_000, "Offline requests that waited longer go before interactive ones.", FORMER, WORKER,
        minimum=0, maximum=30 * DAY_S * 1000)
    min_run_ms: int = option(
        5000, "How long an offline row that gave way to interactive work runs undisturbed once it is back.",
        FORMER, WORKER, minimum=0, maximum=DAY_S * 1000)
    max_crashes: int = option(
        3, "Workers that may die with a request before it is given up.", FORMER, minimum=1, maximum=100)

    # The scripted engine: tokens without a model, for tests and drills of the whole system.
    engine: EngineName = option("mlx", "What decodes: mlx, or scripted tokens.", WORKER, is_hidden=True)
    script_step_s: float = option(
        0.0, "Seconds a scripted step takes.", WORKER, minimum=0, maximum=3600, is_hidden=True)
    script_prefill_token_s: float = option(
        0.0, "Seconds the scripted prefill of a token takes.", WORKER, minimum=0, maximum=3600, is_hidden=True)
    script_tokens_per_step: str = option(
        "1", "Tokens in the first, second, ... scripted step, such as 1,3.", WORKER, is_hidden=True)
    script_eos_position: int | None = option(
        None, "Where scripted completions end by themselves.", WORKER, minimum=0, maximum=1 << 20, is_hidden=True)
    script_crash_text: str | None = option(
        None, "A prompt that holds this text kills a scripted worker.", WORKER, is_hidden=True)
    script_dead_text: str | None = option(
        None, "A prompt that holds this text makes a scripted engine's step raise.", WORKER, is_hidden=True)
    script_hold: Path | None = option(
        None, "No scripted step ends while this file exists.", WORKER, is_hidden=True)
    # fmt: on

    def __getitem__(self, name: str) -> object:
        return getattr(self, name)


def options() -> dict[str, Option]:
    """All options by name, in the order of declaration."""
    return options_of(Settings)


def load(flags: Mapping[str, object], *, environ: Mapping[str, str], directory: Path) -> Settings:
    """Resolve every option from flags, `environ` and `directory/mtplx.toml`.

    Args:
        flags: values given on the command line, by option name; None where the flag was not given.

    Raises:
        ConfigError: an unknown key or variable, or a value that is not allowed.
    """
    known = options()
    given = from_file(directory / FILE_NAME, known)
    given |= from_environ(environ, known)
    given |= {
        name: known[name].parse(raw, source=f"flag {known[name].flag}")
        for name, raw in flags.items()
        if raw not in (None, ())  # a flag that may be repeated and was not given is an empty tuple
    }
    preset = PRESETS[str(given.get("batching_preset", known["batching_preset"].default))]
    spelled_out = {declared.name: getattr(preset, declared.name) for declared in fields(Preset)}
    # Every value was checked against its field's type by `parse`.
    return Settings(**(spelled_out | given))


def as_environ(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with every option spelled out, so that a child process resolves to the same settings.

    Variables and not flags, because everybody on a machine can read a process's flags, and a Redis URL may hold a
    password.
    """
    rest = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    values = {known.variable: settings[name] for name, known in options().items()}
    return rest | {name: _as_text(value) for name, value in values.items() if value is not None}


def _as_text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
