"""The table of families in the documentation: written between two markers, and read back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from harness.families.checkpoints import NOT_HERE
from harness.families.outcomes import Outcome
from mtplx_core.engine import SchedulerMode

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
START = "<!-- families: written by `python -m harness.families` -->"
END = "<!-- end of families -->"
_HEAD = ("| family | runs in | caches | why not in a better mode |", "|---|---|---|---|")
_SHORTER = (
    (r"^(mtp|ar)_batch cannot run this model: ", ""),
    (r"; use (ar_batch|serial)$", ""),
    (r", and rows of different lengths need .*$", ""),
    (r"its log-probabilities lie .*$", "its log-probabilities are not the model's own"),
    (r"decoding (three|a few) short rows fails \(.*$", "decoding rows of different lengths fails"),
)
"""What a reader of one line does without, and figures, which differ from machine to machine."""


def row_of(outcome: Outcome) -> str:
    """Return the family's line."""
    refusals = outcome.refusals or {}
    if outcome.family in NOT_HERE:
        cells = ["not built here", "", NOT_HERE[outcome.family]]
    else:
        cells = [
            mode_cell(outcome.mode),
            outcome.caches,
            "; ".join(f"`{name}`: {in_short(why)}" for name, why in refusals.items()),
        ]
    return "| " + " | ".join([outcome.family, *cells]) + " |"


def mode_cell(mode: SchedulerMode | None) -> str:
    """Return how the table names a mode."""
    return f"`{mode}`" if mode else "no mode"


def in_short(reason: str) -> str:
    """Return a refusal's reason without figures and shapes."""
    for pattern, replacement in _SHORTER:
        reason = re.sub(pattern, replacement, reason)
    return reason.replace("|", "/")


def written_rows(document: Path = DOCUMENT) -> dict[str, str]:
    """Return the lines of the table in the document, by family."""
    _, _, rest = document.read_text().partition(START)
    lines = rest.partition(END)[0].split("\n")
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and line not in _HEAD}


def write_rows(rows: Iterable[str], document: Path = DOCUMENT) -> None:
    """Put these lines where the table stands."""
    before, start, rest = document.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{document} has no markers for the table of families")
    document.write_text("\n".join([before + START, *_HEAD, *rows, END + after]))
