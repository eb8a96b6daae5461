"""Settings for all tests: every run draws the same examples, and no test depends on who runs it."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("gradwire", derandomize=True, deadline=None, database=None)
settings.load_profile("gradwire")

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TERMINAL = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS")


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a launcher around pytest nor the terminal it runs on shows through."""
    for name in (*LAUNCHER, *TERMINAL):
        monkeypatch.delenv(name, raising=False)
