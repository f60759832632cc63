"""Every text family of the installed mlx-lm behind the engine a worker would choose: exact answers, or a said refusal.

Model: each family's tiny random checkpoint, through the real loader.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.families.checkpoints import NOT_HERE, NOT_TIED, can_tie, families, write_checkpoint
from harness.families.outcomes import chosen_mode, outcome_of
from harness.families.table import mode_cell, row_of, written_rows
from mtplx_core.errors import ModelLoadError
from mtplx_core.models.loader import load_model

HERE = [family for family in families() if family not in NOT_HERE]
TIED = [family for family in HERE if can_tie(family)]


@pytest.mark.parametrize("family", HERE)
def test_family_says_what_its_model_says_and_the_table_says_how(family: str, tmp_path: Path) -> None:
    outcome = outcome_of(family, tmp_path / family)

    assert outcome.failures == ()
    assert row_of(outcome) == written_rows()[family], "write the table anew: python -m harness.families"


@pytest.mark.parametrize("family", [family for family in TIED if family not in NOT_TIED])
def test_family_with_tied_embeddings_runs_in_the_same_mode(family: str, tmp_path: Path) -> None:
    loaded = load_model(write_checkpoint(tmp_path / family, family, is_tied=True))

    assert f"| {mode_cell(chosen_mode(loaded).mode)} |" in written_rows()[family]


@pytest.mark.parametrize("family", sorted(NOT_TIED))
def test_family_that_mlx_lm_cannot_tie_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        load_model(write_checkpoint(tmp_path / family, family, is_tied=True))


def test_table_has_every_family_once() -> None:
    """A family is a module of mlx-lm that defines a model."""
    assert sorted(written_rows()) == sorted(families())
