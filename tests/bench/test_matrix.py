"""``scripts.matrix``: right programs are told from wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.matrix import (
    Cell,
    Matrix,
    ProgramEnd,
    is_wrong,
    judge,
    rows,
    run,
)
from tests.each import each

SPECIMENS = Path(__file__).parent / "specimens"
PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"


@pytest.mark.multi
def test_a_program_that_drifts_in_silence_is_found() -> None:
    found = run(Matrix(SPECIMENS, ("drifts",), ("none",)))
    assert is_wrong(found)
    assert found["drifts"][1]["none"] == Cell(
        "WRONG", "ranks end with different 2.weight"
    )


@pytest.mark.slow
@pytest.mark.multi
def test_a_program_that_forgets_residuals_is_found() -> None:
    found = run(Matrix(SPECIMENS, ("forgets",), ("none", "topk")))["forgets"][1]
    assert found["none"] == Cell("same")
    assert found["topk"].verdict == "WRONG"
    assert found["topk"].text.endswith("of rank 0 ends otherwise after a resume")


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(300)
def test_a_plan_overlaps_a_gan_and_refuses_sparse_embeddings() -> None:
    asked = ("gan", "sparse_embeddings")
    found = run(Matrix(only=asked, exchanges=("plan",), seed=3))
    assert not is_wrong(found), rows(found)
    assert found["gan"][1]["plan"].overlapped > 0
    refused = found["sparse_embeddings"][1]["plan"]
    assert refused.verdict == "refused"
    assert "row-sparse" in refused.text


GOOD = ProgramEnd({"w": "1"}, num_attached=1)


@each(
    "runs, native, text",
    [
        ([[GOOD, GOOD], [GOOD, GOOD]], {"w": "1"}, None),
        ([[GOOD, GOOD], [GOOD, GOOD]], {"w": "2"}, "w ends otherwise than natively"),
        ([[GOOD, ProgramEnd({"w": "2"})]], None, "ranks end with different w"),
        (
            [[GOOD] * 2, [ProgramEnd({"w": "2"})] * 2],
            None,
            "w of rank 0 ends otherwise after",
        ),
        ([[ProgramEnd({}), ProgramEnd({})]], None, "its model has no parameters"),
        (
            [[ProgramEnd({}, "InvalidSetting: x", True), GOOD]],
            None,
            "InvalidSetting: x",
        ),
    ],
)
def test_what_is_wrong_is_said(
    runs: list[list[ProgramEnd]], native: dict[str, str] | None, text: str | None
) -> None:
    found = judge(runs, native)
    assert (found is None) == (text is None)
    if found is not None:
        assert found.verdict == "WRONG"
        assert found.text.startswith(text or "")


@pytest.mark.smoke
def test_the_page_has_every_program() -> None:
    rows = [
        line.split(" | ")
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    shown = {row[0].removeprefix("| "): row for row in rows}
    for program in Matrix().programs():
        row = shown[program.path.stem]
        assert row[2] == str(program.num_lines)
        assert "WRONG" not in " ".join(row)
