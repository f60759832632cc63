"""Says what a head is worth: acceptance, speed against plain decoding and against lookup alone, and whether outputs
are what plain decoding gives. A head that does not pay is named as such, with the reason.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mtplx_core.engine import Geometry, Row, SamplingParams
from mtplx_core.errors import ForgeError
from mtplx_core.forge.acceptance import Replay, replay
from mtplx_core.forge.states import Lesson
from mtplx_core.heads.attached import AttachedHead
from mtplx_core.heads.base import Head
from mtplx_core.models.loader import LoadedModel
from mtplx_core.mtp.depth import FixedDepth
from mtplx_core.mtp.engine import MtpBatchEngine, MtpOptions
from mtplx_core.sampling.audit import audit

OnVerify = Callable[[int, int], None]
"""Runs done, runs in all."""

PAYS_FROM = 1.02
"""Speed against the better of plain decoding and lookup alone, at some width, from which a head pays."""
_TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class Trials:
    """What is run."""

    widths: tuple[int, ...] = (1, 4, 8)
    tokens: int = 64
    """Of each answer."""
    rounds: int = 3
    """Runs of every way of decoding per width; ways take turns, so that a noisy neighbour meets all of them."""


class DecodeWay(NamedTuple):
    """One way of decoding."""

    name: str
    depth: int
    head: Head | None


class DecodedBatch(NamedTuple):
    """One batch of answers, decoded one way."""

    tokens: int
    seconds: float
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    drafters: dict[str, dict[str, int]]
    answers: tuple[tuple[Row, tuple[int, ...]], ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Report(NamedTuple):
    """The verdict and what it rests on, as plain JSON values."""

    pays: bool
    why: str
    facts: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"pays": self.pays, "why": self.why, **self.facts}


def verify(
    loaded: LoadedModel,
    head: AttachedHead,
    held_out: Sequence[Lesson],
    *,
    trials: Trials,
    on_progress: OnVerify,
) -> Report:
    """Replay held-out answers and decode held-out prompts anew, at several widths and in every way.

    Raises:
        ForgeError: too few held-out prompts for the widest batch.
    """
    prompts = sorted({lesson.prompt for lesson in held_out}, key=lambda prompt: (hash(prompt), prompt))
    if len(prompts) < max(trials.widths):
        raise ForgeError(f"{len(prompts)} prompts are held out, {max(trials.widths)} are needed")
    ways = [DecodeWay("plain", 0, None), DecodeWay("lookup", 1, None)]
    ways += [DecodeWay(f"head_depth_{depth}", depth, head) for depth in range(1, head.max_depth + 1)]
    bench = _Bench(loaded, prompts, trials, on_progress, total=_runs(trials, ways))
    speed = {str(width): bench.compare(ways, width) for width in trials.widths}
    checked = bench.audit()
    facts = {
        "held_out": {key: value._asdict() for key, value in replays(head, held_out).items()},
        "engine": speed,
        "sampled": bench.acceptance(DecodeWay("head", 1, head), temperature=_TEMPERATURES[1]),
        "audit": checked,
        "trials": asdict(trials),
    }
    pays, why = judge(speed, is_exact=checked["passed"])
    return Report(pays, why, facts)


def replays(head: Head, held_out: Sequence[Lesson]) -> dict[str, Replay]:
    """Acceptance by replay, by the temperature of the recorded answers."""
    temperatures = sorted({round(lesson.temperature, 2) for lesson in held_out})
    named = {"greedy" if value == 0 else f"temperature {value}": value for value in temperatures if value >= 0}
    return {
        name: replay(head, [lesson for lesson in held_out if round(lesson.temperature, 2) == value])
        for name, value in named.items()
    }


def judge(speed: dict[str, Any], *, is_exact: bool) -> tuple[bool, str]:
    """Whether a head pays, and why or why not.

    Args:
        speed: by width, then by way of decoding, its figures; the speeds are ratios to plain decoding.
        is_exact: whether all outputs are plain decoding's, up to ties.
    """
    if not is_exact:
        return False, "outputs differ from plain decoding beyond ties"
    best, at = 0.0, ""
    for width, ways in speed.items():
        bar = max(1.0, ways["lookup"]["speed"])
        for name, way in ways.items():
            if name.startswith("head_") and way["speed"] / bar > best:
                best, at = way["speed"] / bar, f"{name} at {width} rows"
    told = f"{at} decodes {best:.2f} times as fast as the better of plain decoding and lookup alone"
    if best < PAYS_FROM:
        return False, f"at best, {told}; {PAYS_FROM} is the least that pays"
    return True, told


def decode(loaded: LoadedModel, way: DecodeWay, rows: Sequence[Row]) -> DecodedBatch:
    """Decode rows together in one engine made for them, to the end; the clock runs from the first decoded token."""
    longest = max(len(row.prompt) + row.max_tokens for row in rows)
    geometry = Geometry(decode_batch_max=len(rows), max_context_tokens=longest, depth=way.depth)
    options = MtpOptions(policy=FixedDepth(way.depth))
    engine = MtpBatchEngine(loaded, geometry, head=way.head, options=options)
    answers: dict[str, list[int]] = {row.row_id: [] for row in rows}
    drafted, accepted = [0] * way.depth, [0] * way.depth
    for row in rows:
        engine.admit(row)
    started, first = time.perf_counter(), None
    while engine.active_rows:
        result = engine.step()
        if result.tokens and first is None:
            first, early = time.perf_counter(), sum(len(part.tokens) for part in result.tokens)
        for part in result.tokens:
            answers[part.row_id] += part.tokens
        for end in result.ends:
            if end.reason == "error":
                raise ForgeError(f"decoding failed: {end.message}")
            drafted = [a + b for a, b in zip(drafted, end.stats.drafted, strict=False)] or drafted
            accepted = [a + b for a, b in zip(accepted, end.stats.accepted, strict=False)] or accepted
    seconds = time.perf_counter() - (first or started)
    tokens = sum(map(len, answers.values())) - (early if first else 0)
    drafters = engine.snapshot()["drafters"]
    engine.close()
    told = tuple((row, tuple(answers[row.row_id])) for row in rows)
    return DecodedBatch(tokens, seconds, tuple(drafted), tuple(accepted), drafters, told)


class _Bench:
    """Decodes held-out prompts in turn and keeps what came out."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[tuple[int, ...]],
        trials: Trials,
        on_progress: OnVerify,
        *,
        total: int,
    ) -> None:
        self._loaded = loaded
        self._prompts = prompts
        self._trials = trials
        self._on_progress = on_progress
        self._total = total
        self._done = 0
        self._kept: list[tuple[Row, tuple[int, ...]]] = []

    def compare(self, ways: Sequence[DecodeWay], width: int) -> dict[str, Any]:
        """Speed and acceptance of all ways at one width."""
        runs: dict[str, list[DecodedBatch]] = {way.name: [] for way in ways}
        for number in range(self._trials.rounds):
            rows = self._rows(width, start=number * width, temperature=0.0)
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                runs[way.name].append(self._decode(way, rows))
        plain = [run.tokens_per_s for run in runs["plain"]]
        result: dict[str, Any] = {"plain_tokens_per_s": round(statistics.median(plain), 2)}
        for way in ways[1:]:
            self._kept += [answer for run in runs[way.name] for answer in run.answers]
            ratios = [run.tokens_per_s / base for run, base in zip(runs[way.name], plain, strict=True)]
            result[way.name] = {"speed": round(statistics.median(ratios), 3), **_acceptance(runs[way.name])}
        return result

    def acceptance(self, way: DecodeWay, *, temperature: float) -> dict[str, Any]:
        """What sampled answers accept."""
        rows = self._rows(max(self._trials.widths), start=0, temperature=temperature)
        run = self._decode(way, rows)
        self._kept += run.answers
        return {"temperature": temperature, **_acceptance([run])}

    def audit(self) -> dict[str, Any]:
        """Check every answer that was drafted for against one plain forward."""
        audits = [
            audit(self._loaded.model, row.prompt, answer, row.sampling) for row, answer in dict.fromkeys(self._kept)
        ]
        return {
            "answers": len(audits),
            "tokens": sum(one.positions for one in audits),
            "ties": sum(len(one.mismatches) for one in audits if one.passed),
            "passed": all(one.passed for one in audits),
        }

    def _rows(self, width: int, *, start: int, temperature: float) -> list[Row]:
        chosen = [self._prompts[(start + place) % len(self._prompts)] for place in range(width)]
        return [
            Row(str(place), prompt, self._trials.tokens, SamplingParams(temperature=temperature, seed=start + place))
            for place, prompt in enumerate(chosen)
        ]

    def _decode(self, way: DecodeWay, rows: Sequence[Row]) -> DecodedBatch:
        run = decode(self._loaded, way, rows)
        self._done += 1
        self._on_progress(self._done, self._total)
        return run


def _runs(trials: Trials, ways: Sequence[DecodeWay]) -> int:
    return len(trials.widths) * trials.rounds * len(ways) + 1


def _acceptance(runs: Sequence[DecodedBatch]) -> dict[str, Any]:
    drafted = [sum(column) for column in zip(*(run.drafted for run in runs), strict=True)]
    accepted = [sum(column) for column in zip(*(run.accepted for run in runs), strict=True)]
    names = sorted({name for run in runs for name in run.drafters})
    return {
        "accepted_by_place": [round(a / max(d, 1), 4) for a, d in zip(accepted, drafted, strict=True)],
        "drafters": {
            name: {key: sum(run.drafters.get(name, {}).get(key, 0) for run in runs) for key in ("tried", "right")}
            for name in names
        },
    }
