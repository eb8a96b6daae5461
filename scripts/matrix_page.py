"""Writes the tables of ``docs/matrix.md``: programs by exchanges, pairs of features.

    python -m scripts.matrix_page [--pairs]

It runs all programs, or with ``--pairs`` writes the table of pairs alone. It ends with
1 if a cell is wrong.

A pair of features is refused by a sentence, or a test trains with both. The table of
``gradwire.runtime.pairs`` says which are refused, and by what words. All other pairs of
``ALL`` go together, which ``SHOWN`` shows.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

from gradwire.runtime.pairs import CAUTIONS, REFUSED, Feature, RefusedPair

from .matrix import Found, Matrix, is_wrong, rows, run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "matrix.md"
EXCHANGES = (
    "none",
    "error feedback",
    "momentum correction",
    "powersgd",
    "deft",
    "selective",
    "a plan",
    "a plan with overlap",
    "auto",
)
MODELS = ("plain module", Feature.DDP, Feature.DTENSORS)
ALL = (
    *EXCHANGES,
    Feature.LOCAL_STEPS,
    Feature.QUORUM,
    *MODELS,
    *("mesh", "shards", "sparse rows", "compiled", "reentrant checkpoint"),
    *(
        "scaler",
        "optimizer",
        "bucket_cap_mb",
        "num_channels",
        "compress_if",
        "guard_every",
    ),
    *("backend", "on_failure", "check_every", "checksums"),
)
"""The features whose pairs the table is of; an attach has one exchange and one kind of
model.
"""
SHOWN = "tests/runtime/test_pairs.py::test_what_goes_together"
"""The test that trains with each pair that is not refused."""
_IMPLIED: dict[str, str] = {
    Feature.PLAN_WITH_OVERLAP: Feature.PLAN,
    Feature.SPARSE_ROWS: Feature.SPARSE_DTENSORS,
    Feature.QUORUM: Feature.LOCAL_STEPS,
    Feature.LOCAL_STEPS: Feature.LOCK_STEP,
    **dict.fromkeys(
        ("powersgd", "deft", "selective", "momentum correction"),
        Feature.JOINT_PAYLOAD,
    ),
}
PAIRS = "<!-- pairs -->", "<!-- end of the pairs -->"
PROGRAMS = "<!-- matrix -->", "<!-- end of the matrix -->"
"""The marks around each table of the page."""
VERDICTS = ("same", "refused", "skipped", "WRONG")


def pairs() -> list[tuple[str, str]]:
    """Every pair of features that one attach may have."""
    return [
        (first, second)
        for first, second in combinations(ALL, 2)
        if not any({first, second} <= {*kind} for kind in (EXCHANGES, MODELS))
    ]


def refusal_of(first: str, second: str) -> RefusedPair | None:
    """The refusal of a pair; None where it goes together."""
    names = [{name, _IMPLIED.get(name, name)} for name in (first, second)]
    for pair in REFUSED:
        for mine, other in (names, names[::-1]):
            if pair.first in mine and pair.second in other:
                return pair
    return None


def together(first: str) -> list[str]:
    """The later features that one goes with."""
    return [b for a, b in pairs() if a == first and refusal_of(a, b) is None]


def pairs_table() -> str:
    """The table of pairs."""
    refused = [
        (a, b, found) for a, b in pairs() if (found := refusal_of(a, b)) is not None
    ]
    lines = ["| feature | beside | refused |", "| --- | --- | --- |"]
    lines += [f"| {a} | {b} | {_sentence(refusal)} |" for a, b, refusal in refused]
    lines += ["", "| feature | beside | works, with a warning |", "| --- | --- | --- |"]
    for pair in CAUTIONS:
        warning = pair.text.format(first="...", second="...")
        lines.append(f"| {pair.first} | {pair.second} | {warning} |")
    works = len(pairs()) - len(refused)
    lines += [
        "",
        f"Features: {', '.join(ALL)}. The first {len(EXCHANGES)} features are "
        "exchanges. Each call of `attach` takes one exchange and one kind of model: "
        f"{', '.join(MODELS)}. Of the {len(pairs())} pairs {len(refused)} are refused, "
        f"and {works} work. The test `{SHOWN}` trains with each pair that works.",
    ]
    return "\n".join(lines)


def _sentence(pair: RefusedPair) -> str:
    text = f"{pair.what} must be {pair.accepted}; {pair.remedy}"
    return text.format(first="...", second=pair.second)


def programs_table(results: Found) -> str:
    """The table of programs, and its notes."""
    made, notes = rows(results)
    columns = list(made[0])
    lines = [f"| program | {' | '.join(columns[1:])} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(str(value) for value in row.values())} |" for row in made]
    counted = [cell.verdict for _, cells in results.values() for cell in cells.values()]
    reported = ", ".join(f"{counted.count(verdict)} {verdict}" for verdict in VERDICTS)
    return "\n".join(
        [
            *lines,
            "",
            f"{len(counted)} cells: {reported}.",
            *(f"\n{note}" for note in notes),
        ]
    )


def put(table: str, marks: tuple[str, str]) -> None:
    """Puts a table between its marks of the page."""
    begin, end = marks
    text = PAGE.read_text(encoding="utf-8")
    before = text.split(begin)[0]
    after = text.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def main() -> None:
    """Runs the programs, and writes the page."""
    put(pairs_table(), PAIRS)
    if "--pairs" in sys.argv:
        return
    results = run(Matrix(), lambda done, what: print(f"{done:.0%} {what}", flush=True))
    put(programs_table(results), PROGRAMS)
    sys.exit(int(is_wrong(results)))


if __name__ == "__main__":
    main()
