"""What the queue costs: the same prompts straight on the engine and through HTTP, Redis, former and worker.

`python -m benchmarks.overhead [--quick] [--json]`. The worker of the stack idles while the engine is measured, and
the other way round.
"""

from __future__ import annotations

import asyncio
import os
import time

import click

from benchmarks.clients import PROMPTS, Answer, Round, chat_body, run_round
from benchmarks.ratios import paired_ratio, report

CLIENTS = 16
ROWS = 8


@click.command()
@click.option("--quick", is_flag=True, help="Fewer rounds, shorter answers.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--mode", default="ar_batch", type=click.Choice(["serial", "ar_batch", "mtp_batch"]))
def main(*, quick: bool, as_json: bool, mode: str) -> None:
    """Measure."""
    from mtplx_core.blas import load_blas

    blas = load_blas()
    rounds, max_tokens = (3, 32) if quick else (7, 96)

    from harness.stack import Stack

    stack = Stack()
    stack.arguments["worker"] = ("--scheduler-mode", mode, "--decode-batch-max", str(ROWS))
    with stack:
        direct, served = measure(stack.url, mode=mode, rounds=rounds, max_tokens=max_tokens)
    tokens = paired_ratio([r.tokens_per_s for r in served], [r.tokens_per_s for r in direct])
    first = paired_ratio([r.mean_first_token_s for r in served], [r.mean_first_token_s for r in direct])
    lines = [
        f"{CLIENTS} clients, {ROWS} rows, {max_tokens} tokens each, {mode}, {rounds} pairs, {blas}",
        f"tokens/s, through the queue over straight:      {tokens}",
        f"first token, through the queue over straight:   {first}",
    ]
    report(lines, {"tokens_ratio": tokens.median, "ttft_ratio": first.median}, as_json=as_json)


def measure(url: str, *, mode: str, rounds: int, max_tokens: int) -> tuple[list[Round], list[Round]]:
    """Alternate straight and served rounds; the first pair warms up and is dropped."""
    engine = DirectEngine(mode=mode)
    direct, served = [], []
    for _ in range(rounds + 1):
        direct.append(engine.run_round(max_tokens))
        bodies = [
            chat_body(PROMPTS[i % len(PROMPTS)], model=engine.name, max_tokens=max_tokens, ignore_eos=True)
            for i in range(CLIENTS)
        ]
        served.append(asyncio.run(run_round(url, bodies)))
    return direct[1:], served[1:]


class DirectEngine:
    """The worker's engine in this process, fed by a loop that does nothing else."""

    def __init__(self, *, mode: str) -> None:
        from harness.chat_prompts import chat_prompt
        from mtplx_core.build import build_engine
        from mtplx_core.engine import Geometry, Profile, SchedulerMode
        from mtplx_core.models.fetch import default_cache_dir, default_model_dir
        from mtplx_core.models.loader import load_model

        folder = default_model_dir(default_cache_dir(os.environ))
        loaded = load_model(folder)
        self.name = loaded.name
        self._prompts = [chat_prompt(loaded, prompt) for prompt in PROMPTS]
        self._engine = build_engine(
            SchedulerMode(mode), loaded, geometry=Geometry(decode_batch_max=ROWS), profile=Profile.BALANCED
        )

    def run_round(self, max_tokens: int) -> Round:
        """All clients' prompts at once; whoever finds no row waits in line."""
        from mtplx_core.engine import Row

        waiting = [
            Row(f"r{i}", self._prompts[i % len(self._prompts)], max_tokens, ignore_eos=True) for i in range(CLIENTS)
        ]
        first: dict[str, float] = {}
        answers: list[Answer] = []
        started = time.perf_counter()
        while waiting or self._engine.active_rows:
            while waiting and self._engine.active_rows < ROWS:
                self._engine.admit(waiting.pop(0))
            result = self._engine.step()
            now = time.perf_counter() - started
            for tokens in result.tokens:
                first.setdefault(tokens.row_id, now)
            answers += [Answer(max_tokens, first[end.row_id], now, "") for end in result.ends]
        return Round(tuple(answers), time.perf_counter() - started)


if __name__ == "__main__":
    main()
