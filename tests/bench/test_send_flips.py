"""``send_flips.py``: bits flip in real sends, and verdicts tell what became of the
ranks.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.send_flips import Outcome, Trial, judged
from tests.each import each

RIGHT, WRONG = Outcome("", (), "", 7, 9), Outcome("", (), "", 8, 9)
NAMED, OTHER = (Outcome("RankFailed", (rank,), "", 0, 5) for rank in (2, 1))

ROOT = Path(__file__).parents[2]


@each(
    "ends, codes, verdict",
    [
        ([RIGHT, RIGHT, RIGHT], [0, 0, 0], "no effect"),
        ([WRONG, WRONG, WRONG], [0, 0, 0], "wrong"),
        ([RIGHT, WRONG, RIGHT], [0, 0, 0], "diverged"),
        ([NAMED, NAMED, NAMED], [0, 0, 0], "named"),
        ([RIGHT, NAMED, RIGHT], [0, 0, 0], "named"),
        ([WRONG, NAMED, RIGHT], [0, 0, 0], "noticed"),
        ([NAMED, OTHER, NAMED], [0, 0, 0], "noticed"),
        ([None, NAMED, NAMED], [-6, 0, 0], "killed"),
        ([None, NAMED, NAMED], [-9, 0, 0], "hung"),
    ],
)
def test_a_trial_is_judged_by_how_its_ranks_ended(
    ends: list[Outcome | None], codes: list[int], verdict: str
) -> None:
    assert (
        judged(Trial(0, "ring", True, victim=2), 7, ends, codes, "payload 50 of 56")
        == verdict
    )


@pytest.mark.multi
@pytest.mark.slow
def test_flips_are_refused_by_name_with_checksums_alone() -> None:
    # In a process of its own, as all processes that it forks from have loaded the
    # library.
    command = [sys.executable, "-m", "tests.bench.send_flips", "--trials", "1"]
    said = subprocess.run(
        command, check=True, cwd=ROOT, capture_output=True, encoding="utf-8"
    ).stdout
    # the first six are of payloads
    plain, _, sealed, _ = map(ast.literal_eval, said.splitlines())
    assert sealed["named"] == 1
    # Parameters may well be right: rounding takes low bits of gradients, and counts of
    # used parameters are compared with 0 alone. The order of calls is not repeated.
    assert plain["named"] == plain["not struck"] == 0
