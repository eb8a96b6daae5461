"""A reproduction measures what is asked for once, keeps it at once, and refuses foreign
files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gradwire.errors import InvalidSetting
from papers import store
from papers.frame import Ask, Claim, Figure, Findings, Reproduction
from papers.store import Done, document, run

pytestmark = pytest.mark.slow


class Paper:
    """Two figures that count how often they are measured."""

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.complete = True
        self.fails = False
        self.seen: list[str] = []

    def first(self, ask: Ask) -> Findings:
        self.measured.append("first")
        claim = Claim("2 is 2", "table 1", "it is", True)
        row = {"name": "a", "step_s": 1.5, "lost": float("nan")}
        return Findings((row,), (claim,), ("a note",), complete=self.complete)

    def second(self, ask: Ask) -> Findings:
        if self.fails:
            raise RuntimeError("no more power")
        self.measured.append("second")
        self.seen += [name for name, found in ask.earlier.items() if found.rows]
        for done, item in ask.each("xy"):
            ask.report(done, item)
        return Findings(({"name": "b", "num": 2},))

    @property
    def reproduction(self) -> Reproduction:
        figures = (
            Figure("first", "one", self.first),
            Figure("second", "two", self.second),
        )
        return Reproduction(
            paper="A paper", assumptions=("none",), contents=(), figures=figures
        )

    def run(
        self, path: Path, *wanted: str, quick: bool = False, fresh: bool = False
    ) -> list[Done]:
        self.reported: list[tuple[float, str]] = []

        def report(fraction: float, what: str) -> None:
            self.reported.append((fraction, what))

        found = run(
            "paper",
            self.reproduction,
            wanted,
            path,
            quick=quick,
            fresh=fresh,
            report=report,
        )
        return list(found)


@pytest.fixture
def paper() -> Paper:
    return Paper()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "paper.json"


def test_a_second_run_measures_nothing_and_gives_the_same(
    paper: Paper, path: Path
) -> None:
    paper.fails = True
    with pytest.raises(RuntimeError, match="no more power"):
        paper.run(path)
    paper.fails = False  # a run that was cut short goes on where it ended
    first = paper.run(path)
    second = paper.run(path)
    assert paper.measured == ["first", "second"]
    assert [done.kept for done in first + second] == [True, False, True, True]
    assert second[0].findings.claims == first[0].findings.claims
    assert second[0].findings.notes == ("a note",)
    assert second[1].findings.rows == first[1].findings.rows
    plain = document("paper", paper.reproduction, first)
    assert plain == document("paper", paper.reproduction, second)


def test_a_figure_is_kept_for_the_same_settings_and_version_alone(
    paper: Paper, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper.run(path, "first", quick=True)
    assert paper.run(path, "first", quick=True)[0].kept
    assert not paper.run(path, "first", quick=False)[0].kept
    assert not paper.run(path, "first", fresh=True)[0].kept
    monkeypatch.setattr(store, "__version__", "0.0.0")
    assert not paper.run(path, "first")[0].kept


def test_the_file_is_plain_json(paper: Paper, path: Path) -> None:
    paper.run(path)
    stored = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert stored["figures"]["first"]["rows"] == [
        {"name": "a", "step_s": 1.5, "lost": None}
    ]
    assert stored["assumptions"] == ["none"]
    assert list(path.parent.iterdir()) == [path]


def test_nothing_is_written_through_links_that_others_may_have_laid(
    paper: Paper, path: Path
) -> None:
    path.parent.mkdir()
    precious = path.parent / "thesis"
    precious.write_text("years of work")
    for name in (f"{path.stem}.new", f"{path.name}.{os.getpid()}.new"):
        (path.parent / name).symlink_to(precious)
    paper.run(path, "first")
    assert precious.read_text() == "years of work"
    assert json.loads(path.read_text())["reproduction"] == "paper"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema_version": 1, "reproduction": "other", "figures": {}}',
        '{"schema_version": 2, "reproduction": "paper", "figures": {}}',
        '{"schema_version": 1, "reproduction": "paper", "figures": []}',
        '{"schema_version": 1, "reproduction": "paper", "figures": {"first": '
        '{"rows": []}}}',
    ],
)
def test_foreign_files_are_refused_before_anything_is_measured(
    paper: Paper, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "paper.json"
    path.write_text(text)
    with pytest.raises(
        InvalidSetting, match="is not a file of gradwire reproduce paper"
    ):
        paper.run(path)
    assert paper.measured == []
    assert path.read_text() == text
