"""Workflows run what the repository has: targets of its Makefile, and files of its own.

The gate is short and has the two corners of the versions that are claimed.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from gradwire.runtime.agreement.versions import TRIED
from tests.each import each

ROOT = Path(__file__).parents[1]
WORKFLOWS = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}
GATE_MINUTES = 15
"""The longest that a change waits for its gate."""
COMMAND = re.compile(r"^ *(?:- )?run: (?!\|)(.+)$", re.M)
PAIR = re.compile(r'\{python: "([\d.]+)", torch: "([\d.]+)"\}')


def commands(text: str) -> list[str]:
    """The commands of steps that have one line."""
    return COMMAND.findall(text)


def missing(command: str) -> list[str]:
    """Targets and files of a command that the repository lacks."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    words = shlex.split(command)
    found = []
    if words[0] == "make":
        asked = [word for word in words[1:] if "=" not in word]
        found += [word for word in asked if word not in targets]
    if "/" in words[0]:
        file = ROOT / words[0]
        found += [] if os.access(file, os.X_OK) else [words[0]]
    return found


def pairs(text: str) -> set[tuple[str, str]]:
    return set(PAIR.findall(text))


@each("name", WORKFLOWS)
def test_what_a_workflow_runs_is_in_the_repository(name: str) -> None:
    assert [word for line in commands(WORKFLOWS[name]) for word in missing(line)] == []


def test_a_command_that_the_repository_lacks_is_found() -> None:
    assert missing("make test-most") == ["test-most"]
    assert missing(".ci/walk") == [".ci/walk"]
    assert commands("      - run: make check\n        run: make no-such\n") == [
        "make check",
        "make no-such",
    ]


def test_the_gate_has_the_two_corners_and_15_minutes() -> None:
    gate = WORKFLOWS["ci.yml"]
    minutes = re.findall(r"timeout-minutes: (\d+)", gate)
    assert len(minutes) == gate.count("runs-on:")
    assert max(map(int, minutes)) <= GATE_MINUTES
    corners = {
        tuple(tuple(map(int, version.split(".")[:2])) for version in pair)
        for pair in pairs(gate)
    }
    assert corners == {
        tuple(TRIED[name][end] for name in ("Python", "torch")) for end in (0, 1)
    }
    assert commands(gate) == ["make check", "make test"]


def test_the_nightly_matrix_has_pairs_of_the_table_and_each_python() -> None:
    nightly = pairs(WORKFLOWS["nightly.yml"])
    table = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \| (\d+\.\d+) \|", table, re.M)
    claimed = {(python, torch) for torch, python in rows}
    assert pairs(WORKFLOWS["ci.yml"]) < nightly <= claimed
    assert {python for python, _ in nightly} == {python for python, _ in claimed}
    assert commands(WORKFLOWS["nightly.yml"]) == ["make test-all"]
