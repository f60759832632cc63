"""What `mtplx doctor` finds, and what it says to do. Made-up systems, and files; runs on no engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from console.commands.doctor import (
    Finding,
    check_files,
    check_machine,
    check_system,
    judge_daemons,
    judge_server,
    run_doctor,
)
from console.overview import lanes_of
from console.settings import Settings
from tests.console.overviews import overview, queue, server, worker


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.about: finding for finding in findings}


def test_doctor_finds_nothing_wrong_with_a_healthy_system() -> None:
    findings = [*judge_server(overview()), *judge_daemons(overview())]

    assert {finding.level for finding in findings} == {"ok"}


def test_doctor_refuses_an_old_redis() -> None:
    finding = by_name(judge_server(overview(server_view=server(version="6.2.1"))))["redis"]

    assert (finding.level, finding.advice) == ("problem", "use Redis 7.0 or newer, or Valkey")


def test_doctor_refuses_a_redis_that_evicts() -> None:
    finding = by_name(judge_server(overview(server_view=server(eviction="allkeys-lru"))))["eviction"]

    assert finding.level == "problem"
    assert "CONFIG SET maxmemory-policy noeviction" in finding.advice


def test_doctor_warns_of_a_redis_that_can_forget() -> None:
    finding = by_name(judge_server(overview(server_view=server(config={"appendonly": "no", "save": ""}))))[
        "persistence"
    ]

    assert finding.level == "warning"
    assert "appendfsync always" in finding.advice


def test_doctor_misses_a_former() -> None:
    finding = by_name(judge_daemons(overview(daemons=[])))["former"]

    assert (finding.level, finding.fact) == ("problem", "0 at work")


def test_doctor_mentions_that_there_is_no_batch_worker() -> None:
    finding = by_name(judge_daemons(overview(daemons=[])))["batch worker"]

    assert (finding.level, finding.fact) == ("warning", "0 at work")
    assert "mtplx batch-worker" in finding.advice


def test_doctor_misses_a_worker_that_accepts() -> None:
    lanes = lanes_of([worker("mac-1", is_accepting=False)])

    assert by_name(judge_daemons(overview(lanes=lanes)))["worker"].level == "problem"


def test_doctor_warns_of_dead_letters() -> None:
    assert by_name(judge_daemons(overview(queue_view=queue(dead_letters=1))))["dead letters"].level == "warning"


def test_doctor_says_how_to_start_when_there_is_no_broker(tmp_path: Path) -> None:
    (finding,) = check_system(Settings(data_dir=tmp_path))

    assert (finding.about, finding.level) == ("redis", "warning")
    assert "mtplx up" in finding.advice


def test_doctor_reports_a_redis_that_cannot_be_reached(tmp_path: Path) -> None:
    (finding,) = check_system(Settings(redis=f"unix://{tmp_path}/nothing.sock"))

    assert (finding.about, finding.level) == ("redis", "problem")


def test_doctor_reports_a_url_that_cannot_be_read() -> None:
    (finding,) = check_system(Settings(redis="http://queue"))

    assert finding.level == "problem"


def test_doctor_names_matrix_product_device_and_packages() -> None:
    findings = by_name(check_machine())

    assert "mlx" in findings["packages"].fact
    assert "Device(" in findings["device"].fact
    assert findings["matrix product"].fact


def test_doctor_says_how_to_get_a_model_that_is_missing(tmp_path: Path) -> None:
    finding = by_name(check_files(Settings(cache_dir=tmp_path, data_dir=tmp_path), {}))["model"]

    assert (finding.level, finding.advice) == ("warning", "mtplx fetch")


def test_doctor_fails_when_there_is_a_problem(tmp_path: Path) -> None:
    settings = Settings(redis=f"unix://{tmp_path}/nothing.sock", cache_dir=tmp_path, data_dir=tmp_path)

    assert run_doctor(settings, {}, as_json=True) == 1
