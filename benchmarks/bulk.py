"""`mtplx run` against `mlx_lm.batch_generate`: the same 200 prompts, weights, BLAS and rows, in one run.

`python -m benchmarks.bulk [--quick] [--json] [--head FOLDER]`. The two take turns, each idle while the other decodes.
Both are timed from their first prompt on, ours to the end of its process, mlx-lm's to that of the one call: Python's
start and the tokeniser's are in neither. The same with the whole of our process is told beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.clients import PROMPTS
from benchmarks.ratios import Ratio, paired_ratio, report

TOPICS = ("tides", "bread", "chess", "volcanoes", "jazz", "glass", "bees", "maps", "salt", "clocks")
CONTEXT = 1024


class Plan(NamedTuple):
    """How much is done."""

    prompts: int
    max_tokens: int
    rounds: int


class Done(NamedTuple):
    """All prompts, once."""

    tokens: int
    seconds: float
    whole_s: float
    """With the start of its process."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Comparison(NamedTuple):
    """Ours over theirs."""

    decoding: Ratio
    process: Ratio
    """With the start of our process."""


@click.command()
@click.option("--quick", is_flag=True, help="Fewer prompts, shorter answers.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--mode", default="mtp_batch", type=click.Choice(["ar_batch", "mtp_batch"]))
@click.option("--rows", default="8,32", show_default=True, help="Rows on both sides.")
@click.option("--rounds", default=3, show_default=True, help="Pairs of runs.")
@click.option("--head", type=click.Path(path_type=Path, exists=True), help="Else the shipped one.")
def main(*, quick: bool, as_json: bool, mode: str, rows: str, rounds: int, head: Path | None) -> None:
    """Measure."""
    from mtplx_core.blas import load_blas

    blas = load_blas()
    plan = Plan(32, 24, 1) if quick else Plan(200, 96, rounds)
    reference = MlxLm()
    worker = ("--scheduler-mode", mode, *(("--head", str(head.resolve())) if head is not None else ()))
    ratios = {count: compare(reference, count, plan, worker) for count in map(int, rows.split(","))}
    lines = [f"{plan.prompts} prompts, up to {plan.max_tokens} tokens each, {plan.rounds} pairs, {mode}, {blas}"]
    for count, (decoding, process) in ratios.items():
        lines.append(f"{count:3} rows: mtplx run over mlx_lm.batch_generate, tokens/s: {decoding}")
        lines.append(f"          with the start of our process: {process}")
    result = {f"tokens_ratio_{count}": one.decoding.median for count, one in ratios.items()}
    result |= {f"process_ratio_{count}": one.process.median for count, one in ratios.items()}
    report(lines, result, as_json=as_json)


def compare(reference: MlxLm, rows: int, plan: Plan, worker: tuple[str, ...]) -> Comparison:
    """Pairs of rounds on lanes of so many rows; a short round before them warms both up."""
    from harness.stack import Stack

    stack = Stack()
    stack.arguments["worker"] = (*worker, "--decode-batch-max", str(rows), "--max-context-tokens", str(CONTEXT))
    ours, theirs = [], []
    with stack:
        warm_up = Plan(rows, 8, 1)
        run_ours(stack, warm_up)
        reference.run(rows, warm_up)
        for _ in range(plan.rounds):
            ours.append(run_ours(stack, plan))
            theirs.append(reference.run(rows, plan))
            click.echo(f"{rows} rows: {ours[-1].tokens_per_s:.1f} over {theirs[-1].tokens_per_s:.1f}", err=True)
    baseline = [each.tokens_per_s for each in theirs]
    return Comparison(
        paired_ratio([each.tokens_per_s for each in ours], baseline),
        paired_ratio([each.tokens / each.whole_s for each in ours], baseline),
    )


def questions(count: int) -> list[str]:
    """As many different prompts."""
    return [f"{PROMPTS[i % len(PROMPTS)]} Mention {TOPICS[i // len(PROMPTS) % 10]} {i}." for i in range(count)]


def run_ours(stack: Any, plan: Plan) -> Done:
    """`mtplx run` as a process, greedy."""
    from console.supervisor import mtplx_command
    from harness.stack import clean_environment

    prompts, output = stack.folder / "prompts.jsonl", stack.folder / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions(plan.prompts)))
    command = [*mtplx_command("run"), str(prompts), "-o", str(output), "--overwrite", "--redis", stack.redis_url]
    command += ["--max-tokens", str(plan.max_tokens), "--temperature", "0"]
    started = time.perf_counter()
    with subprocess.Popen(command, env=clean_environment(), stderr=subprocess.DEVNULL) as process:
        wait_for_work(stack.redis_url)
        began = time.perf_counter()
        assert process.wait() == 0
    ended = time.perf_counter()
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(answers) == plan.prompts
    return Done(sum(answer["completion_tokens"] for answer in answers), ended - began, ended - started)


def wait_for_work(redis_url: str) -> None:
    """Wait until the first prompt is accepted."""
    from redis import Redis

    from broker import keys

    with Redis.from_url(redis_url) as client:
        while not int(client.hget(keys.LOAD, "requests:offline") or 0):
            time.sleep(0.01)


class MlxLm:
    """mlx-lm's batch generation on the same folder, in this process."""

    def __init__(self) -> None:
        from mlx_lm.tokenizer_utils import TokenizerWrapper
        from transformers import AutoTokenizer

        from mtplx_core.models.fetch import default_cache_dir, default_model_dir
        from mtplx_core.models.loader import load_model

        folder = default_model_dir(default_cache_dir(os.environ))
        self._loaded = load_model(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._tokenizer: Any = TokenizerWrapper(tokenizer, eos_token_ids=list(self._loaded.eos_token_ids))

    def run(self, rows: int, plan: Plan) -> Done:
        """Greedy, as its default sampler is."""
        from mlx_lm import batch_generate

        prompts = [self._chat(text) for text in questions(plan.prompts)]
        started = time.perf_counter()
        batch: Any = batch_generate(
            self._loaded.model,
            self._tokenizer,
            prompts,
            max_tokens=plan.max_tokens,
            completion_batch_size=rows,
            prefill_batch_size=rows,
            return_token_ids=True,
        )
        # The token that ends an answer was decoded too; our count has it, its lists do not.
        seconds = time.perf_counter() - started
        tokens = sum(min(len(ids) + 1, plan.max_tokens) for ids in batch.token_ids)
        return Done(tokens, seconds, seconds)

    def _chat(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids


if __name__ == "__main__":
    main()
