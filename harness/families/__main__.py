"""Run every text family of mlx-lm through the engine a worker would choose, and write the table of families.

python -m harness.families                 # all of them, and docs/models.md
python -m harness.families granite gemma2  # these, printed only
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.families.checkpoints import NOT_HERE, families
from harness.families.outcomes import Outcome, outcome_of
from harness.families.table import DOCUMENT, row_of, write_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where an answer is not the model's own."""
    parser = argparse.ArgumentParser(prog="python -m harness.families", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("families", nargs="*", help="these only, without writing the table")
    chosen = parser.parse_args(arguments).families
    outcomes = [_shown(family) for family in chosen or families()]
    if not chosen:
        write_rows([row_of(outcome) for outcome in outcomes])
        print(f"the table in {DOCUMENT} is written")
    return int(any(outcome.failures for outcome in outcomes))


def _shown(family: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = Outcome(family) if family in NOT_HERE else outcome_of(family, Path(folder) / family)
    print(row_of(outcome), *outcome.failures, sep="\n    ", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
