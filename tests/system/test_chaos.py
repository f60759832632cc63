"""One minute in which everything is broken in turn, by a fixed seed. Real processes; engine: scripted."""

from __future__ import annotations

from benchmarks.chaos import run_chaos

SEED = 7
SECONDS = 60.0


async def test_minute_of_chaos_loses_nothing() -> None:
    findings = await run_chaos(seconds=SECONDS, seed=SEED, at_once=8, step_s=0.03)

    result, story = findings.result, "\n".join([*findings.ledger.story, *findings.complaints])
    assert (result["lost"], result["doubled"], result["unexplained_errors"]) == (0, 0, 0), story
    assert result["leftovers"] == [], story
    assert result["finished_share"] >= 0.95, story
    assert result["requests"] > 100, "hardly anything was asked"
    assert {"worker", "former", "api", "redis"} <= set(result["kills"])
