"""A folder that the papers' tests share, as figures share what they have measured."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from papers.zen.captures import stem
from tests.papers.small import SMALL, Measured, ask, made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It holds captures of all models."""
    place = tmp_path_factory.mktemp("papers")
    for found in (
        made("lstm", 2000, 16, 40),
        made("transformer", 40_000, 1, 2000),
        made("lstm, one sentence", 2000, 16, 6),
    ):
        found.save(place / f"capture-{stem(found.name)}.npz")
    return place


@pytest.fixture(scope="session")
def measured(folder: Path) -> Measured:
    """A figure of a paper in small, measured once."""
    return cache(lambda paper, name: SMALL[paper][name](ask(folder)))
