"""What verbs print: one JSON object, plain columns in a pipe, colours only on a
terminal.
"""

from __future__ import annotations

import io
import json
import math

import pytest

from gradwire import __version__
from gradwire.cli.report import output

ROWS: list[dict[str, object]] = [
    {"name": "ddp", "step_s": 0.5, "loss": math.nan},
    {"name": "onebit", "step_s": 0.25, "loss": 2.5, "ok": True},
]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_json_is_one_object_with_plain_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.emit("bench", ROWS, as_json=True, title="unused")
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["command", "version", "machine", "rows"]
    assert (result["command"], result["version"]) == ("bench", __version__)
    assert result["rows"] == [{**ROWS[0], "loss": None}, ROWS[1]]


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit("bench", ROWS, as_json=False, title="two runs")
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "two runs"
    assert "250 ms" in text
    assert text.isascii()


def test_a_terminal_gets_a_table_and_no_color_is_honoured(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", terminal)
    output.emit("bench", ROWS, as_json=False, title="two runs")
    coloured = terminal.getvalue()
    assert "─" in coloured
    assert "\x1b[" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    output.emit("bench", ROWS, as_json=False, title="two runs")
    assert "\x1b[3" not in terminal.getvalue()[len(coloured) :]


def test_the_machine_is_described() -> None:
    found = output.machine()
    assert {
        "cpu",
        "num_cores",
        "memory_bytes",
        "os",
        "python",
        "torch",
        "gradwire",
    } <= set(found)
    assert isinstance(found["num_cores"], int)
    assert found["num_cores"] >= 1
    assert isinstance(found["memory_bytes"], int)
    assert found["memory_bytes"] > 2**20
    assert json.loads(json.dumps(found)) == found


def test_progress_is_shown_on_a_terminal(
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stderr", terminal)
    with output.progress("working", total=2) as advance:
        advance(note="first half")
        advance(note="second half")
    assert "working" in terminal.getvalue()
    assert "second half" in terminal.getvalue()
    assert capsys.readouterr().out == ""
