"""SSFusion's replay: what is said follows from the rows, and without links nothing is."""

from __future__ import annotations

import pytest

from gradwire.errors import TestbedUnavailable
from papers.frame import Ask
from papers.ssfusion import replayed


def test_without_shaped_links_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise TestbedUnavailable("no links")

    monkeypatch.setattr(replayed, "run", unavailable)
    found = replayed.figure11_replayed(Ask(quick=True, report=lambda done, what: None, earlier={}))
    assert (found.rows, found.complete) == ((), False)
    assert "no links" in found.notes[0]
