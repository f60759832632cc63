"""The whole stack against `mlx_lm.server` on the same folder: the same streaming clients, the same BLAS in both.

`python -m benchmarks.serving [--quick] [--json] [--clients 1,8] [--requests N] [--head FOLDER]`. A client asks again as
soon as it has its answer, so that so many are at it at once all the time and not only until the first is done. Both
servers run throughout and take turns, so that a noisy machine meets both; whoever is not asked idles. mlx-lm's server
decodes up to 32 requests together by itself.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import click
import httpx

from benchmarks.clients import PROMPTS, Round, chat_body, run_clients
from benchmarks.ratios import Ratio, median, paired_ratio, report

CLIENTS = "1,4,8,16"
ROWS = 16
"""So that every client has one, as at the other server."""
_READY_S = 120.0
# The server in a process whose matrix product is ours, and which does not turn away the sixth that comes at once; its
# command line has no way to ask for either.
_SERVER = """
import socketserver
from mtplx_core.blas import load_blas
load_blas()
socketserver.TCPServer.request_queue_size = 128
from mlx_lm.server import main
main()
"""


class Plan(NamedTuple):
    """How much is asked."""

    rounds: int
    requests: int
    """Of each client, in a round."""
    max_tokens: int


class Compared(NamedTuple):
    """One number of clients."""

    tokens: Ratio
    first_token: Ratio
    served_tokens_per_s: float
    reference_tokens_per_s: float


@click.command()
@click.option("--quick", is_flag=True, help="Fewer rounds, shorter answers.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--mode", default="mtp_batch", type=click.Choice(["serial", "ar_batch", "mtp_batch"]))
@click.option("--clients", default=CLIENTS, show_default=True, help="How many ask at once.")
@click.option("--requests", default=3, show_default=True, help="Of each client, one after another, in a round.")
@click.option("--head", type=click.Path(path_type=Path, exists=True), help="Else the shipped one.")
@click.option("--worker", multiple=True, help="Further argument of the worker, such as --worker=--depth=2.")
def main(
    *,
    quick: bool,
    as_json: bool,
    mode: str,
    clients: str,
    requests: int,
    head: Path | None,
    worker: tuple[str, ...],
) -> None:
    """Measure."""
    from mtplx_core.blas import load_blas

    blas = load_blas()
    plan = Plan(2, 1, 32) if quick else Plan(3, requests, 128)

    from harness.stack import Stack, free_port

    stack = Stack()
    drafting = ("--head", str(head.resolve())) if head is not None else ()
    stack.arguments["worker"] = ("--scheduler-mode", mode, "--decode-batch-max", str(ROWS), *drafting, *worker)
    with stack, MlxLmServer(_model_folder(), free_port()) as reference:
        name = _served_name(stack.url)
        warm_up(stack.url, name, reference.url)
        click.echo(
            f"{plan.rounds} pairs of rounds of {plan.requests} x {plan.max_tokens} tokens, "
            f"{mode} of {ROWS} rows, {blas}"
        )
        result = {}
        for count in map(int, clients.split(",")):
            one = compare((stack.url, name), reference.url, plan, clients=count)
            click.echo(
                f"{count:3} clients: tokens/s {one.served_tokens_per_s:6.1f} over {one.reference_tokens_per_s:6.1f} = "
                f"{one.tokens}, first token {one.first_token}"
            )
            result[str(count)] = {"tokens_ratio": one.tokens.median, "ttft_ratio": one.first_token.median}
    report([], {"clients": result}, as_json=as_json)


class MlxLmServer:
    """mlx-lm's own server as a child process."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        arguments = ["--model", str(folder), "--port", str(port), "--log-level", "ERROR"]
        handle, name = tempfile.mkstemp(prefix="mlx-lm-server-", suffix=".log")
        self._log = Path(name)
        command = [sys.executable, "-c", _SERVER, *arguments]
        self._process = subprocess.Popen(command, stdout=handle, stderr=subprocess.STDOUT)
        os.close(handle)

    def __enter__(self) -> MlxLmServer:
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                told = self._log.read_text(errors="replace")[-2000:]
                self._end()
                raise RuntimeError(f"mlx_lm.server did not start:\n{told}")
            time.sleep(0.2)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._log.unlink()


def warm_up(url: str, name: str, reference_url: str) -> None:
    """Load weights and compile what is compiled at the first request, in both."""
    for where, model in ((url, name), (reference_url, "default_model")):
        asyncio.run(run_clients(where, _bodies(model, Plan(1, 1, 8), clients=2, turn=0)))


def compare(served: tuple[str, str], reference_url: str, plan: Plan, *, clients: int) -> Compared:
    """Alternate rounds; both are asked the same."""
    url, name = served
    ours: list[Round] = []
    theirs: list[Round] = []
    for turn in range(plan.rounds):
        sides = [(ours, url, name), (theirs, reference_url, "default_model")]
        for kept, where, model in sides if turn % 2 else reversed(sides):
            bodies = _bodies(model, plan, clients=clients, turn=turn)
            kept.append(asyncio.run(run_clients(where, bodies)))
    return Compared(
        paired_ratio([one.tokens_per_s for one in ours], [one.tokens_per_s for one in theirs]),
        paired_ratio([one.mean_first_token_s for one in ours], [one.mean_first_token_s for one in theirs]),
        median([one.tokens_per_s for one in ours]),
        median([one.tokens_per_s for one in theirs]),
    )


def _bodies(model: str, plan: Plan, *, clients: int, turn: int) -> list[list[dict[str, object]]]:
    """Mixed prompts, each with a beginning of its own, so that a prompt cache helps with the template alone."""
    return [
        [
            chat_body(
                f"Question {clients}.{turn}.{place}.{ordinal}: {PROMPTS[(turn + place + 3 * ordinal) % len(PROMPTS)]}",
                model=model,
                max_tokens=plan.max_tokens,
            )
            for ordinal in range(plan.requests)
        ]
        for place in range(clients)
    ]


def _served_name(url: str) -> str:
    return str(httpx.get(f"{url}/v1/models", trust_env=False, timeout=10).json()["data"][0]["id"])


def _model_folder() -> Path:
    from mtplx_core.models.fetch import default_cache_dir, default_model_dir

    return default_model_dir(default_cache_dir(os.environ))


if __name__ == "__main__":
    main()
