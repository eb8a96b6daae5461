"""The page of measurements: its three layers, its contents, and the marks of age."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts import required_rate
from scripts.measured_marks import COMMENT, PAGE, ROOT, main, marked
from scripts.pictures import measured

TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
SECTION = re.compile(r"^##+ (.+)\n", re.M)
TABLE = re.compile(r"^\| ", re.M)
COMMAND = re.compile(r"^Command:", re.M)


def sections(text: str) -> dict[str, str]:
    """The text of each section by its heading."""
    _, *parts = SECTION.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def missing_layers(text: str) -> list[str]:
    """What sections lack: an answer in bold first, then commit, table and command."""
    found = []
    for heading, body in sections(text).items():
        mark = COMMENT.search(body)
        table = TABLE.search(body)
        if not body.lstrip().startswith("**"):
            found.append(f"{heading}: no answer in bold")
        if not mark or (table and table.start() < mark.start()):
            found.append(f"{heading}: no commit before the table")
        if table and not COMMAND.search(body, table.start()):
            found.append(f"{heading}: no command below the table")
    return found


def test_each_section_has_answer_table_and_command() -> None:
    assert len(sections(TEXT)) > 25
    assert missing_layers(TEXT) == []


def test_a_section_without_a_layer_is_found_out() -> None:
    good = "## A?\n\n**Yes.**\n\n<!-- measured abc: src/ -->\n\n| a |\n\nCommand: `x`\n"
    assert missing_layers(good) == []
    assert missing_layers(good.replace("**Yes.**", "Yes.")) != []
    assert missing_layers(good.replace("<!--", "<!")) != []
    assert missing_layers(good.replace("Command", "By")) != []


def test_the_contents_have_every_question_and_the_paths_are_there() -> None:
    contents = TEXT[: TEXT.index("\n## ")]
    asked = re.findall(r"^## (.+)\n", TEXT, re.M)
    assert [one for one in asked if f"[{one}](#" not in contents] == []
    paths = {path for mark in COMMENT.finditer(TEXT) for path in mark["paths"].split()}
    assert [path for path in paths if not (ROOT / path).exists()] == []


class Checkout:
    """A small repository with a page, whose section measures one of its folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "docs").mkdir(parents=True)
        (root / "code").mkdir()
        self.git("init", "-q")
        self.measured = self.commit("code/a.py", "1")
        comment = f"<!-- measured {self.measured}: code/ -->\n"
        self.page.write_text(f"## A?\n\n{comment}\n| a |\n", encoding="utf-8")

    @property
    def page(self) -> Path:
        return self.root / PAGE

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(
            ["git", *who, *words],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def commit(self, path: str, text: str) -> str:
        (self.root / path).write_text(text, encoding="utf-8")
        self.git("add", path)
        self.git("commit", "-q", "-m", "a change")
        return self.git("rev-parse", "--short=8", "HEAD")

    def mark(self) -> str:
        """The line that the script writes."""
        main(self.root)
        (line,) = re.findall(r"^\*.*\*$", self.page.read_text(encoding="utf-8"), re.M)
        return str(line)


def test_a_mark_counts_changes_of_what_was_measured(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.mark().startswith(f"*Measured at `{checkout.measured}`, 20")
    fresh = checkout.mark()
    checkout.commit("other.py", "2")
    assert checkout.mark() == fresh
    assert "changed" not in fresh
    checkout.commit("code/a.py", "2")
    assert checkout.mark().endswith("Since then 1 commit changed the code.*")
    checkout.commit("code/b.py", "2")
    assert checkout.mark().endswith("Since then 2 commits changed the code.*")


def test_without_history_marks_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = Checkout(tmp_path / "whole")
    checkout.commit("code/a.py", "2")
    checkout.mark()
    checkout.commit(PAGE.as_posix(), checkout.page.read_text(encoding="utf-8"))
    shallow = tmp_path / "shallow"
    origin = checkout.root.as_uri()
    checkout.git("clone", "-q", "--depth=1", origin, str(shallow))
    before = (shallow / PAGE).read_text(encoding="utf-8")
    assert "1 commit changed" in before
    main(shallow)
    assert (shallow / PAGE).read_text(encoding="utf-8") == before
    assert checkout.measured in capsys.readouterr().out
    no_repository = tmp_path / "archive"
    no_repository.mkdir()
    assert marked(before, no_repository) == before


def test_simulated_rates_are_those_of_the_script() -> None:
    rows = measured("How do figures printed elsewhere compare?", "method", "50 %")
    cells = {row["method"]: list(row.values())[1:] for row in rows}
    for method, useful_at in required_rate.METHODS.items():
        for cell, wanted in zip(cells[method], required_rate.USEFUL, strict=True):
            assert useful_at(float(cell)) == pytest.approx(wanted, rel=0.01), method
