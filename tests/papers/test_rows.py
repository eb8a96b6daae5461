"""Each row of docs/papers.md names a file and a test that are there, or says why
not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from papers import names, page
from tests.each import each

ROOT = Path(__file__).parents[2]
TABLE = "| paper | part | state | file | verified by |"


class PaperRow(NamedTuple):
    """One part of a system."""

    paper: str
    part: str
    state: str
    file: str
    verified_by: str


def rows() -> list[PaperRow]:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    body = text.split(TABLE)[1].split("\n\n")[0]
    lines = body.strip().splitlines()[1:]
    return [PaperRow(*map(str.strip, line.strip("|").split("|"))) for line in lines]


def faults(row: PaperRow) -> list[str]:
    """What a row lacks."""
    if "not here" in row.state:
        return [] if ":" in row.state else ["no reason"]
    found = []
    paths = re.findall(r"`([\w./-]+)`", row.file)
    tests = re.findall(r"`((?:lab|papers|tests|src)/[\w./-]+)`", row.verified_by)
    places = re.findall(r"\b(?:figure|table) \d+", row.verified_by)
    if not row.state:
        found.append("no state")
    if not paths:
        found.append("no file")
    if not (tests or places):
        found.append("no test and no figure")
    found += [f"no {path}" for path in (*paths, *tests) if not (ROOT / path).exists()]
    listed = {
        one.place: one for one in page(row.paper.lower().replace("-", "")).contents
    }
    for place in places:
        if place not in listed or not listed[place].figures:
            found.append(f"{place} is not repeated")
    return found


def test_every_row_names_what_is_there() -> None:
    every = rows()
    assert {
        row.paper.lower().replace("-", "") for row in every if "," not in row.paper
    } == {*names()}
    assert {row.part: faults(row) for row in every if faults(row)} == {}


@each(
    "changed, fault",
    [
        ({"file": "`src/nothing.py`"}, "no src/nothing.py"),
        ({"file": "-"}, "no file"),
        ({"verified_by": "hopes"}, "no test and no figure"),
        ({"verified_by": "figure 99"}, "figure 99 is not repeated"),
        ({"state": "not here"}, "no reason"),
    ],
)
def test_a_wrong_row_is_found(changed: dict[str, str], fault: str) -> None:
    assert fault in faults(rows()[0]._replace(**changed))
