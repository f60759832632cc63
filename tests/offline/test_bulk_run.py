"""`mtplx run` as a process: answers, breaking off and going on, tables. Engine: scripted, in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from api.bulk.rows import BulkRow, RowRecipe, count_rows, read_rows
from console.supervisor import mtplx_command
from harness.scripted import ask
from harness.stack import Stack, clean_environment, wait_until
from tests.offline.test_text_client import text_of

RECIPE = RowRecipe("m", is_raw=True)


def command(stack: Stack, prompts: Path, output: Path, *more: str) -> list[str]:
    return [*mtplx_command("run"), str(prompts), "-o", str(output), "--redis", stack.redis_url, *more]


def run(stack: Stack, prompts: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(stack, prompts, output, *more), capture_output=True, text=True, env=clean_environment(), timeout=300
    )


def answers(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_prompt_gets_its_answer_and_a_bad_line_its_error(offline_stack: Stack, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", ["one", {"id": "b", "prompt": "two", "max_tokens": 5}, {"nothing": 1}])

    done = run(offline_stack, prompts, tmp_path / "a.jsonl", "--raw", "--max-tokens", "9")

    by_id = {each["id"]: each for each in answers(tmp_path / "a.jsonl")}
    assert done.returncode == 1, done.stderr
    assert by_id["1"]["text"] == text_of(ask("one", 9).expected)
    assert by_id["b"]["text"] == text_of(ask("two", 5).expected)
    assert by_id["b"]["finish_reason"] == "length"
    assert by_id["3"]["error"]["code"] == "invalid_row"


def test_run_broken_off_by_ctrl_c_goes_on_in_order(offline_stack: Stack, tmp_path: Path) -> None:
    prompts, output = write(tmp_path / "p.jsonl", [f"row {i}" for i in range(60)]), tmp_path / "a.jsonl"
    more = ("--raw", "--max-tokens", "60", "--keep-order", "--in-flight", "8")
    process = subprocess.Popen(command(offline_stack, prompts, output, *more), env=clean_environment())
    wait_until(lambda: output.exists() and output.read_text().count("\n") >= 5, "five answers", timeout_s=120)

    process.send_signal(signal.SIGINT)
    broken_off = process.wait(60)
    before = len(answers(output))
    done = run(offline_stack, prompts, output, *more)

    assert (broken_off, done.returncode) == (130, 0), done.stderr
    assert 5 <= before < 60
    assert [each["text"] for each in answers(output)] == [text_of(ask(f"row {i}", 60).expected) for i in range(60)]
    assert not (tmp_path / "a.jsonl.run").exists()


def test_run_that_was_killed_goes_on_and_cuts_off_half_a_line(offline_stack: Stack, tmp_path: Path) -> None:
    prompts, output = write(tmp_path / "p.jsonl", [f"row {i}" for i in range(40)]), tmp_path / "a.jsonl"
    more = ("--raw", "--max-tokens", "40", "--in-flight", "8")
    process = subprocess.Popen(command(offline_stack, prompts, output, *more), env=clean_environment())
    wait_until(lambda: output.exists() and output.read_text().count("\n") >= 5, "five answers", timeout_s=120)
    process.kill()
    process.wait()
    with output.open("a") as file:
        file.write('{"line": 39, "id": "3')

    done = run(offline_stack, prompts, output, *more)

    assert done.returncode == 0, done.stderr
    assert sorted(each["line"] for each in answers(output)) == list(range(1, 41))


def test_output_of_a_complete_run_is_not_written_over_unasked(offline_stack: Stack, tmp_path: Path) -> None:
    prompts, output = write(tmp_path / "p.jsonl", ["one"]), tmp_path / "a.jsonl"
    run(offline_stack, prompts, output, "--max-tokens", "3")
    before = output.read_text()

    refused = run(offline_stack, prompts, output, "--max-tokens", "3")

    assert refused.returncode == 1
    assert "--overwrite" in refused.stderr
    assert output.read_text() == before


def test_table_without_the_column_is_refused_by_name(offline_stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("question,who\nwhy,me\n")

    refused = run(offline_stack, tmp_path / "p.csv", tmp_path / "a.jsonl", "--column", "prompt")

    assert refused.returncode == 2
    assert "question, who" in refused.stderr


def rows_of(path: Path, recipe: RowRecipe) -> list[BulkRow]:
    rows = list(read_rows(path, recipe))
    assert count_rows(path, recipe.source) == len(rows)
    return rows


def test_csv_fills_a_template_and_keeps_line_breaks_in_fields(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text('a,b\n"x, {b}\ny",1\nz,\n', encoding="utf-8-sig")

    rows = rows_of(tmp_path / "p.csv", RowRecipe("m", template="{a}-{b}", is_raw=True))

    assert [json.loads(row.body)["prompt"] for row in rows] == ["x, {b}\ny-1", "z-"]


def test_parquet_is_read_by_column(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"q": ["one", "two"], "n": [1, 2]}), tmp_path / "p.parquet")

    rows = rows_of(tmp_path / "p.parquet", RowRecipe("m", column="q", system="Be brief.", fields={"max_tokens": 3}))

    assert [row.number for row in rows] == [1, 2]
    assert json.loads(rows[1].body) == {
        "model": "m",
        "max_tokens": 3,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}],
    }


@pytest.mark.parametrize(
    ("record", "endpoint", "part"),
    [
        ("text", "/v1/completions", {"prompt": "text"}),
        ({"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions", {"model": "m"}),
        ({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "p"}}, "/v1/completions", {"prompt": "p"}),
        ({"prompt": [1, 2]}, "/v1/completions", {"prompt": [1, 2]}),
        ({"prompt": "p", "model": "own"}, "/v1/completions", {"model": "own"}),
    ],
    ids=["text", "messages", "batch-line", "tokens", "own-model"],
)
def test_json_line_becomes_the_call_it_means(tmp_path: Path, record: Any, endpoint: str, part: dict[str, Any]) -> None:
    [row] = rows_of(write(tmp_path / "p.jsonl", [record]), RECIPE)

    assert row.endpoint == endpoint
    assert part.items() <= json.loads(row.body).items()


@pytest.mark.parametrize(
    "line", ["{", "3", "null", '{"prompt"}', "\xff"], ids=["cut", "number", "null", "no-value", "x"]
)
def test_line_that_is_no_prompt_is_said_to_be_none(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(line.encode("latin-1") + b"\n")

    [row] = rows_of(tmp_path / "p.jsonl", RECIPE)

    assert row.problem
