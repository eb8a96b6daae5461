"""Ranks of local steps behind a network that parts and heals, on shaped hosts."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gradwire_bench.testbed.hosts import HostLinks, Testbed, shaped_hosts
from gradwire_bench.testbed.launch import launch

LIMIT_S = 400.0
WORLD = 3
MOST_LOST = 40
"""Steps of a push, at most."""


def await_files(folder: Path, what: str, ranks: Future[Any]) -> None:
    """Waits for all ranks to say so; raises if they end before."""
    while len([*folder.glob(f"* {what}")]) < WORLD:
        assert not ranks.done(), ranks.result()
        time.sleep(0.05)


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_rank_behind_a_parted_network_trains_on_and_comes_back(
    tmp_path: Path,
) -> None:
    settings = Testbed(hosts=WORLD)
    command = [sys.executable, "-m", "tests.bench.parted_rank", str(tmp_path)]
    with shaped_hosts(settings) as hosts, ThreadPoolExecutor() as pool:
        links = HostLinks(hosts, settings)
        ranks = pool.submit(
            launch, hosts, command, output="none", timeout_s=LIMIT_S, check=True
        )
        await_files(tmp_path, "has begun", ranks)
        links.part([WORLD - 1])
        await_files(tmp_path, "has lost", ranks)
        links.mend()
        ranks.result()
    reports = [
        json.loads((tmp_path / f"report {rank}.json").read_text())
        for rank in range(WORLD)
    ]
    assert len({one["bits"] for one in reports}) == 1
    assert all(one["bits"] == one["anchors"] for one in reports)
    assert [one["left"] for one in reports] == [[[2]], [[2]], [[0, 1]]]
    assert reports[2]["merged_alone"] == 0
    assert all(one["has_quorum"] for one in reports)
    # What the rank has learnt alone counts. Only a merge may be lost that its owner had
    # closed as the network parted.
    steps = sum(one["step"] for one in reports)
    for one in reports:
        assert steps - MOST_LOST <= one["steps_of_all"] <= steps
        assert steps - MOST_LOST > steps - reports[2]["step"]
