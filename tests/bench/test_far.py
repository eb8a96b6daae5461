"""Runs between far hosts: the rows that they make, here on the loopback."""

from __future__ import annotations

import pytest

from gradwire.cli.report.table import Row
from gradwire.errors import InvalidSetting
from gradwire_bench.runs import connections, far
from tests.runtime.ranks import Ranks


def _connections(rank: int, world: int) -> list[Row]:
    connections.WARM_S = 0.0
    return connections.measure((1, 3), (10, 1000), repeats=2, pause_s=0.0)


def _far(rank: int, world: int) -> list[Row]:
    return far.measure(far.METHODS, 8, 1, turns=2, num_steps=far.WARM_UP + 2)


@pytest.mark.slow
def test_ranks_agree_on_the_seconds_of_each_row() -> None:
    ranks = Ranks(2)
    try:
        rows, others = ranks.run(_connections)
        steps, _ = ranks.run(_far)
    finally:
        ranks.close()
    assert rows == others
    assert [(row["name"], row["size_bytes"]) for row in rows] == [
        ("1 connections", 10),
        ("3 connections", 10),
        ("1 connections", 1000),
        ("3 connections", 1000),
    ]
    assert all(row["after_pause_s"] > 0 and row["warm_s"] > 0 for row in rows)
    assert [row["name"] for row in steps] == [*far.METHODS]
    assert all(row["lowest_s"] <= row["step_s"] <= row["highest_s"] for row in steps)


@pytest.mark.smoke
def test_the_machine_s_own_settings_are_never_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for address in ("127.0.0.1", None):
        if address is None:
            monkeypatch.delenv("MASTER_ADDR", raising=False)
        else:
            monkeypatch.setenv("MASTER_ADDR", address)
        with pytest.raises(InvalidSetting, match="hosts of the testbed only"):
            connections.set_own("tcp_congestion_control", "reno")
