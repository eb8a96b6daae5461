"""``gradwire bench matrix``: right programs are told from wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.errors import InvalidSetting
from gradwire_bench.runs.matrix import (
    BEGIN,
    END,
    PROGRAMS,
    Cell,
    Matrix,
    ProgramEnd,
    ProgramFile,
    is_wrong,
    judge,
    markdown,
    read,
    run,
    write,
)
from gradwire_bench.runs.pairs import MARKS

SPECIMENS = Path(__file__).parent / "specimens"
PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"


def cells(matrix: Matrix) -> dict[str, dict[str, Cell]]:
    return {name: found for name, (_, found) in run(matrix).items()}


@pytest.mark.multi
def test_a_program_that_works_has_the_bits_of_ddp() -> None:
    found = cells(Matrix(only=("multigpu_torchrun",), exchanges=("none",)))
    assert found == {"multigpu_torchrun": {"none": Cell("same")}}


@pytest.mark.multi
def test_a_program_that_drifts_in_silence_is_found() -> None:
    found = run(Matrix(SPECIMENS, ("drifts",), ("none",)))
    assert is_wrong(found)
    assert found["drifts"][1]["none"] == Cell("WRONG", "ranks end with different 2.weight")


@pytest.mark.slow
@pytest.mark.multi
def test_a_program_that_forgets_residuals_is_found() -> None:
    found = cells(Matrix(SPECIMENS, ("forgets",), ("none", "topk")))["forgets"]
    assert found["none"] == Cell("same")
    assert found["topk"].verdict == "WRONG"
    assert found["topk"].text.endswith("of rank 0 ends otherwise after a resume")


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(300)
def test_more_programs() -> None:
    asked = ("nanogpt", "gan", "complex_waves", "sparse_embeddings")
    found = run(Matrix(only=asked, exchanges=("none", "4 bits", "plan"), seed=3))
    assert not is_wrong(found), markdown(found)
    assert found["gan"][1]["plan"].overlapped > 0
    refused = found["sparse_embeddings"][1]["plan"]
    assert refused.verdict == "refused"
    assert "row-sparse" in refused.text


GOOD = ProgramEnd({"w": "1"}, num_attached=1)


@pytest.mark.parametrize(
    ("runs", "native", "text"),
    [
        ([[GOOD, GOOD], [GOOD, GOOD]], {"w": "1"}, None),
        ([[GOOD, GOOD], [GOOD, GOOD]], {"w": "2"}, "w ends otherwise than natively"),
        ([[GOOD, GOOD], [GOOD, GOOD]], {"w": "1", "b": "1"}, "b ends otherwise than natively"),
        ([[GOOD, ProgramEnd({"w": "2"})]], None, "ranks end with different w"),
        ([[GOOD] * 2, [ProgramEnd({"w": "2"})] * 2], None, "w of rank 0 ends otherwise after"),
        ([[ProgramEnd({}), ProgramEnd({})]], None, "its model has no parameters"),
        ([[ProgramEnd({}, "KeyError: x"), GOOD]], None, "KeyError: x"),
        ([[ProgramEnd({}, "InvalidSetting: x", True), GOOD]], None, "InvalidSetting: x"),
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


def test_a_refusal_is_that_of_the_rank_that_refused() -> None:
    ours = ProgramEnd({}, "InvalidSetting: no", True)
    heard = ProgramEnd({}, "RanksDiffer: rank 1 refused", True)
    assert judge([[heard, ours]], None) == Cell("refused", "InvalidSetting: no")


def test_too_many_lines_and_absent_packages_are_shown(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1  # gradwire\n" * 4)
    (tmp_path / "odd.py").write_text("import no_such_package\nfrom one_run import Run\n")
    found = cells(Matrix(tmp_path, exchanges=("none",)))
    assert found["long"]["none"] == Cell("WRONG", "4 lines more than the native program")
    assert found["odd"]["none"] == Cell("skipped", "no_such_package not installed")


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    for asked in (Matrix(only=("nanogpd",)), Matrix(tmp_path)):
        with pytest.raises(InvalidSetting):
            asked.programs()
    with pytest.raises(InvalidSetting, match="topk"):
        Matrix(exchanges=("topq",)).columns()


def test_the_table_goes_between_the_marks(tmp_path: Path) -> None:
    found = {"one": (ProgramFile(Path("one.py"), 2, frozenset(), 3), {"none": Cell("WRONG", "w")})}
    page = tmp_path / "page.md"
    with pytest.raises(InvalidSetting, match="a page with"):
        write(found, page)
    page.write_text(f"before\n{BEGIN}\nstale\n{END}\n{''.join(MARKS)}\nafter\n")
    write(found, page)
    text = page.read_text()
    assert "| a plan | local_steps | exchange must be a compressor or an exchange" in text
    assert "| one | 2 | 3 | WRONG [1] |" in text
    assert "1 cells: 0 same, 0 refused, 0 skipped, 1 WRONG." in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "stale" not in text


def test_the_page_has_every_program() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    shown = {row[0].removeprefix("| "): row for row in rows}
    for program in Matrix().programs():
        row = shown[program.path.stem]
        assert row[2] == str(program.num_lines)
        assert "WRONG" not in " ".join(row)


def test_programs_add_few_lines() -> None:
    programs = [read(path) for path in PROGRAMS.glob("*.py") if path.stem != "one_run"]
    assert len(programs) > 20
    assert all(2 <= one.num_lines <= 3 for one in programs)
