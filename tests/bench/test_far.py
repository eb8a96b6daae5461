"""Runs between far hosts: the rows that they make, here on the loopback."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest

from gradwire.cli.report.table import Row
from gradwire.errors import InvalidSetting
from gradwire_bench.runs import connections, far, rows, turns
from gradwire_bench.testbed import netns
from tests.runtime.ranks import Ranks, RanksFailed


def _connections(rank: int, world: int) -> list[Row]:
    connections.WARM_S = 0.0
    return connections.measure((1, 3), (10, 1000), repeats=2, pause_s=0.0)


def _far(rank: int, world: int) -> list[Row]:
    return far.measure(far.METHODS, 8, 1, turns=2, num_steps=turns.WARM_UP + 2)


def _rows(rank: int, world: int) -> list[dict[str, Any]]:
    return rows.measure(8, turns=1)


@pytest.mark.slow
def test_gathers_in_one_hop_and_in_two_have_a_row_each() -> None:
    with closing(Ranks(6)) as ranks:
        found = ranks.run(_rows)[0]
    assert [row["name"] for row in found] == ["straight", "rows of 3"]
    assert all(row["gather_s"] > 0 for row in found)


@pytest.mark.slow
def test_a_prime_number_of_ranks_has_no_rows() -> None:
    with closing(Ranks(2)) as ranks, pytest.raises(RanksFailed, match="start another"):
        ranks.run(_rows)


@pytest.mark.slow
def test_ranks_agree_on_the_seconds_of_each_row() -> None:
    ranks = Ranks(2)
    try:
        found, others = ranks.run(_connections)
        steps, _ = ranks.run(_far)
    finally:
        ranks.close()
    assert found == others
    assert [(row["name"], row["size_bytes"]) for row in found] == [
        ("1 connections", 10),
        ("3 connections", 10),
        ("1 connections", 1000),
        ("3 connections", 1000),
    ]
    assert all(row["after_pause_s"] > 0 and row["warm_s"] > 0 for row in found)
    assert [row["name"] for row in steps] == [*far.METHODS]
    assert all(row["lowest_s"] <= row["step_s"] <= row["highest_s"] for row in steps)


@pytest.mark.nightly
@pytest.mark.netns
@pytest.mark.timeout(900)
def test_no_rank_is_late_or_lost_in_a_step_of_three_time_outs() -> None:
    """A tenth of 200 MB of gradients on links of 10 Mbit/s take 24 s."""
    hosts = "-m gradwire.cli.main testbed run --hosts 4 --rate 10mbit --"
    run = "-m gradwire_bench.runs.far --width 2236 --turns 1 --steps 4 --methods none"
    python = sys.executable
    done = subprocess.run(
        [python, *hosts.split(), python, *run.split(), "--timeout", "8"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    step_s = float(done.stdout.splitlines()[-1].split()[1])
    assert step_s > 24


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
            netns.set_own("tcp_congestion_control", "reno")
