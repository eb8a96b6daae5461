"""A clock that only layers move."""

from __future__ import annotations

import pytest

from gradwire.measure import layers
from tests.measure.models import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In the place of the clock that layers are measured by."""
    made = Clock()
    monkeypatch.setattr(layers, "clock", made)
    return made
