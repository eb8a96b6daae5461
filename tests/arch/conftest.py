"""Syntax trees are millions of objects without cycles, and stay: no collector looks at
them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _uncollected() -> Iterator[None]:
    """Walking through the trees again and again takes twice as long as parsing."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()
