"""Figures that several files of tests look at, measured once."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.frame import Findings
from papers.zen import captures as zen_captures
from papers.zen import parts as zen_parts
from papers.zen import speed as zen_speed
from tests.papers.figures import ask
from tests.papers.zen_small import MODELS, SMALL, made, speed_rows


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which captures of all models are kept."""
    place = tmp_path_factory.mktemp("zen")
    for found in (
        made("lstm", 2000, 16, 40),
        made("transformer", 40_000, 1, 2000),
        made("lstm, one sentence", 2000, 16, 6),
    ):
        found.save(place / f"capture-{zen_captures.stem(found.name)}.npz")
    return place


@pytest.fixture(scope="session")
def small(folder: Path) -> dict[str, Findings]:
    measured = {name: measure(ask(folder)) for name, measure in SMALL.items()}
    speed = speed_rows()
    measured["figure15"] = Findings(speed, zen_speed.claims15(speed))
    asked = ask(folder, figure15=measured["figure15"])
    measured["figure17b"] = zen_parts.figure17b(asked, MODELS)
    return measured
