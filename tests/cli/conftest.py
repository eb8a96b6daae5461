"""Runs the command line as its console script does, in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from gradwire.cli.main import main


@dataclass(frozen=True)
class Ended:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def gradwire(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """``gradwire("list", "--json")`` is that command line."""

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["gradwire", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capfd.readouterr()
        code = caught.value.code
        assert code is None or isinstance(code, int)
        return Ended(code or 0, printed.out, printed.err)

    return run
