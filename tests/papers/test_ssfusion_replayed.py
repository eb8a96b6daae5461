"""SSFusion's replay: what is said follows from the rows, and without links nothing is."""

from __future__ import annotations

import pytest

from gradwire.errors import TestbedUnavailable
from papers.frame import Ask, Row
from papers.ssfusion import replayed


def made_up(model: str, took_s: dict[str, float]) -> list[Row]:
    return [
        {
            "name": name,
            "model": model,
            "measured_s": seconds,
            "compute_s": 0.4,
            "fraction_error": 0.03 if name == "ddp" else -0.2,
        }
        for name, seconds in took_s.items()
    ]


SECONDS = {"ddp": 4.0, "omgs": 0.75, "cupcake": 0.9, "ssfusion": 0.6, replayed.OURS: 0.5}
ROWS = made_up("a", SECONDS)


def test_the_claim_is_over_the_best_rival_of_each_model() -> None:
    found = replayed.claim([*ROWS, *made_up("b", {"omgs": 1.2, "cupcake": 1.0, "ssfusion": 2.0})])
    assert found.ours.startswith("-50.0 to 25.0 %")
    assert found.agrees is None
    assert found.why


def test_a_note_says_the_gain_its_bound_and_how_far_the_simulator_is_off() -> None:
    (note,) = replayed.notes(ROWS)
    assert "1/1.20 of ssfusion's" in note
    assert "at 1/1.50" in note
    assert "at most 20 % off" in note


def test_without_shaped_links_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise TestbedUnavailable("no links")

    monkeypatch.setattr(replayed, "run", unavailable)
    found = replayed.figure11_replayed(Ask(quick=True, report=lambda done, what: None, earlier={}))
    assert (found.rows, found.complete) == ((), False)
    assert "no links" in found.notes[0]
