"""A user's mistake is a ValueError whose text says what was given, what there is, what
to do.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gradwire as gw
from gradwire import errors
from tests.each import each


def test_the_tree_is_as_drawn() -> None:
    drawn = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if kind.__module__ == errors.__name__ and issubclass(kind, BaseException):
            assert issubclass(kind, errors.GradwireError)
            assert name in drawn
            assert kind is errors.GradwireError or issubclass(
                kind, ValueError | RuntimeError | AssertionError
            )
    mistakes = (
        errors.NotInstalled,
        errors.UnknownName,
        errors.IncompatiblePair,
        errors.RanksDiffer,
    )
    assert all(issubclass(kind, errors.InvalidSetting) for kind in mistakes)
    assert issubclass(errors.InvalidSetting, ValueError)


def test_each_error_is_one_of_the_library() -> None:
    """An error that only another package raises stands in that package."""
    root = Path(gw.__file__).parent
    files = [path for path in root.rglob("*.py") if path.name != "errors.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    own = [
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    ]
    assert [name for name in own if not re.search(rf"\b{name}\b", text)] == []


def test_an_unknown_name_lists_the_known_ones_and_the_closest() -> None:
    text = str(errors.UnknownName("compressor", "top-k", ["topk", "none", "onebit"]))
    assert "'top-k'" in text
    assert "none, onebit, topk" in text
    assert "did you mean 'topk'?" in text
    assert "choose one" in str(errors.UnknownName("compressor", "zzz", ["topk"]))
    for given in (1, None, 10**5000):
        assert "no compressor is called" in str(
            errors.UnknownName("compressor", given, ["topk"])
        )


def test_invalid_says_given_accepted_and_remedy() -> None:
    error = errors.invalid("hosts", 0, "between 1 and 64", "4 is a good start")
    assert isinstance(error, errors.InvalidSetting)
    assert str(error) == "hosts must be between 1 and 64, got 0; 4 is a good start"


def test_a_failed_rank_is_named() -> None:
    error = errors.RankFailed("rank 2 died", ranks=(2,), step=7)
    assert (error.ranks, error.step) == ((2,), 7)
    assert isinstance(error, RuntimeError)
    assert errors.RankFailed("unknown").ranks == ()


@each(
    "made, said",
    [
        (
            lambda: gw.compress.topk(0.01),
            r"\(density, values.*write topk\(density=0.01\)",
        ),
        (lambda: gw.compress.powersgd(4), r"write powersgd\(rank=4\)"),
        (
            lambda: gw.collective.ring(4),
            r"must be left out, got \(4,\); write ring\(\)",
        ),
        (
            lambda: gw.compress.topk(densty=0.01),
            "no setting of topk is called 'densty'.*'density'",
        ),
    ],
)
def test_a_setting_without_its_name_is_told_the_names(
    made: Callable[[], object], said: str
) -> None:
    with pytest.raises(errors.InvalidSetting, match=said):
        made()


def test_every_exit_code_stands_in_the_pages_table() -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "failures.md"
    rows = re.findall(
        r"^\| (\d+) \| ([A-Z_]+) \|", page.read_text(encoding="utf-8"), re.M
    )
    assert rows == [(str(int(code)), code.name) for code in errors.ExitCode]


CODES = {
    "RankFailed('lost')": 75,
    "RankFailed('bits', exit_code=ExitCode.BITS)": 76,
    "InvalidSetting('density')": 2,
    "ValueError('other')": 1,
}
SCRIPT = """
import os, sys
from gradwire.errors import *
from gradwire.runtime.liveness.blame import leave_by_cause
leave_by_cause()
leave_by_cause()
for raised in sys.argv[1:]:
    if os.fork() == 0:
        raise eval(raised)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.slow
def test_an_uncaught_error_ends_a_script_with_the_code_of_its_cause() -> None:
    command = [sys.executable, "-c", SCRIPT, *CODES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [*map(int, done.stdout.split())] == [*CODES.values()]
    assert done.stderr.count("Traceback") == len(CODES)
