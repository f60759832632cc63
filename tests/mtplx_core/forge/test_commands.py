"""`mtplx forge` from prompts to a head, as a person would run it. Runs on a tiny random llama."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from console.commands.forge import forge
from harness.models import write_tiny_llama


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_tiny_llama(tmp_path / "model"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Say {number} about cats\n" for number in range(40)))
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(forge, arguments, catch_exceptions=False)


def test_forge_makes_a_head_out_of_a_model_and_prompts(model: str, prompts: str, tmp_path: Path) -> None:
    work = tmp_path / "work"

    collected = run(
        *("collect", "--model", model, "--prompts", prompts, "--into", str(work), "--max-tokens", "12", "--rows", "16")
    )
    trained = run(
        *("train", "--model", model, "--states", str(work / "states"), "--run", str(work / "run")),
        *("--epochs", "0.5", "--positions", "512", "--draft-vocabulary", "64"),
    )

    assert collected.exit_code == 0, collected.output
    assert trained.exit_code == 0, trained.output
    made = {path.name for path in (work / "run" / "head").iterdir()}
    assert made == {"head.json", "head.safetensors", "curve.svg"}


def test_collect_asks_for_either_prompts_or_answers(model: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(forge, ["collect", "--model", model, "--into", str(tmp_path)])

    assert result.exit_code == 2
    assert "either --prompts or --answers" in result.output


def test_verify_writes_its_report_and_saves_only_what_pays(model: str, prompts: str, tmp_path: Path) -> None:
    work, saved = tmp_path / "work", tmp_path / "saved"
    states, head = str(work / "states"), work / "run" / "head"
    topics = tmp_path / "topics.txt"
    topics.write_text("9 about cats\n")
    run("collect", "--model", model, "--prompts", prompts, "--into", str(work), "--max-tokens", "12", "--rows", "16")
    run(
        *("train", "--model", model, "--states", states, "--run", str(work / "run"), "--hold-out", str(topics)),
        *("--epochs", "0.5", "--positions", "512", "--draft-vocabulary", "64"),
    )

    result = CliRunner().invoke(
        forge,
        [
            *("verify", "--model", model, "--states", states, "--head", str(head), "--hold-out", str(topics)),
            *("--save", str(saved), "--tokens", "8", "--widths", "1,2"),
        ],
    )

    assert (head / "verify.json").exists(), result.output
    assert saved.exists() == (result.exit_code == 0)
    assert ("does not pay" in result.output) == (result.exit_code != 0)
