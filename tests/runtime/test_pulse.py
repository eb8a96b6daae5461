"""The pulse: every rank that falls silent is found, whichever it is, and by each of the others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import count

import pytest
import torch.distributed as dist

from gradwire.runtime.failure import pulse
from gradwire.runtime.failure.pulse import Pulse
from gradwire.runtime.step import wire

WORLD = 3
_names = count()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pulse]]:
    """Three ranks that share a store which outlives them all."""
    monkeypatch.setattr(pulse, "PERIOD_S", 0.05)
    monkeypatch.setattr(pulse, "PATIENCE_S", 1.0)
    monkeypatch.setattr(pulse, "LINGER_S", 0.1)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False)
    monkeypatch.setattr(wire, "_given", [store])
    name = f"{wire.REJOINED}{next(_names)}"
    with ExitStack() as stack:
        found = []
        for rank in range(WORLD):
            own = Pulse(name, rank, WORLD, lambda alarm: None, lambda: None, lambda error: None)
            stack.callback(own.stop)
            found.append(own)
        yield found


def test_while_all_live_nobody_is_silent(ranks: list[Pulse]) -> None:
    assert [one.silent_ranks() for one in ranks] == [()] * WORLD


@pytest.mark.parametrize("lost", range(WORLD))
def test_whoever_falls_silent_is_found_by_all_others(ranks: list[Pulse], lost: int) -> None:
    assert all(len(one.signs()) == WORLD for one in ranks)
    ranks[lost].stop()
    others = [one for one in ranks if one.rank != lost]
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(Pulse.silent_ranks, others)] == [(lost,)] * len(others)
    assert not any(one.store_is_silent for one in others)
