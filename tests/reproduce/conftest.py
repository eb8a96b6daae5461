"""Figures that several files of tests look at, measured once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.reproduce import _zen_captures, _zen_speed
from gradwire.reproduce._frame import Findings
from tests.reproduce.zen_small import MODELS, SMALL, ask, made, speed_rows


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which captures of all models are kept."""
    place = tmp_path_factory.mktemp("zen")
    for found in (
        made("lstm", 2000, 16, 40),
        made("transformer", 40_000, 1, 2000),
        made("lstm, one sentence", 2000, 16, 6),
    ):
        found.save(place / f"capture-{_zen_captures.stem(found.name)}.npz")
    return place


@pytest.fixture(scope="session")
def small(folder: Path) -> dict[str, Findings]:
    measured = {name: measure(ask(folder)) for name, measure in SMALL.items()}
    speed = speed_rows()
    measured["figure15"] = Findings(speed, _zen_speed.claims15(speed))
    asked = ask(folder, figure15=measured["figure15"])
    measured["figure17b"] = _zen_speed.figure17b(asked, MODELS)
    return measured
