"""What a Redis keeps over a crash, in words. Pure; runs on no engine."""

from __future__ import annotations

import pytest

from console.persistence import judge_persistence


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        pytest.param({"appendonly": "yes", "appendfsync": "always", "save": ""}, "always", id="always"),
        pytest.param({"appendonly": "yes", "appendfsync": "everysec", "save": ""}, "everysec", id="everysec"),
        pytest.param({"appendonly": "yes", "appendfsync": "no", "save": ""}, "no", id="no-fsync"),
        pytest.param({"appendonly": "no", "appendfsync": "always", "save": "3600 1"}, "snapshots", id="snapshots"),
        pytest.param({"appendonly": "no", "appendfsync": "always", "save": ""}, "none", id="none"),
        pytest.param({}, "unknown", id="not-told"),
    ],
)
def test_persistence_is_named(config: dict[str, str], policy: str) -> None:
    assert judge_persistence(config).policy == policy


def test_persistence_needs_no_advice_when_every_write_reaches_the_disk() -> None:
    assert judge_persistence({"appendonly": "yes", "appendfsync": "always"}).advice == ""


@pytest.mark.parametrize("config", [{}, {"appendonly": "no"}, {"appendonly": "yes", "appendfsync": "everysec"}])
def test_persistence_says_what_to_do_when_something_can_be_lost(config: dict[str, str]) -> None:
    assert judge_persistence(config).advice
