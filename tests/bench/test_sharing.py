"""Ranks of one machine: neighbours share a core, and queues are short, or it is said
why not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire_bench.errors import TestbedUnavailable
from gradwire_bench.schedule.sharing import keep_queues_short
from gradwire_bench.testbed import netns

CODE = """
import json, os, sys, threading, time
from gradwire_bench.schedule.sharing import share_cores
there = threading.Thread(target=time.sleep, args=(5,), daemon=True)
there.start()
share_cores(int(sys.argv[1]), int(sys.argv[2]))
print(json.dumps([
    [
        sorted(os.sched_getaffinity(thread)),
        os.sched_getscheduler(thread) == os.SCHED_BATCH,
    ]
    for thread in (0, there.native_id)
]))
"""


def settled(rank: int, num_ranks: int) -> list[tuple[list[int], bool]]:
    """Cores of a process' first thread and of another, and whether they are never
    preempted.
    """
    command = [sys.executable, "-c", CODE, str(rank), str(num_ranks)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True
    )
    return [(cores, batch) for cores, batch in json.loads(done.stdout)]


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="needs Linux")
def test_all_threads_of_a_rank_are_kept_on_its_core() -> None:
    cores = sorted(os.sched_getaffinity(0))
    before = os.sched_getscheduler(0) == os.SCHED_BATCH
    for rank in (0, 2 * len(cores) - 1):
        assert settled(rank, 2 * len(cores)) == [([cores[rank // 2]], True)] * 2
    assert settled(0, len(cores)) == [(cores, before)] * 2


def test_queues_that_cannot_be_kept_short_end_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", netns.host_address(0))
    monkeypatch.setattr(netns, "TCP_SETTINGS", tmp_path)
    keep_queues_short(1e8)
    assert (tmp_path / "tcp_rmem").read_text("ascii") == "4096 250000 500000"
    monkeypatch.setattr(netns, "TCP_SETTINGS", tmp_path / "absent")
    with pytest.raises(
        TestbedUnavailable, match="No such file or directory; in a container"
    ):
        keep_queues_short(1e8)


def test_the_machines_own_queues_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netns, "TCP_SETTINGS", tmp_path)
    for address in ("127.0.0.1", "10.0.0.5"):
        monkeypatch.setenv("MASTER_ADDR", address)
        keep_queues_short(1e8)
    monkeypatch.delenv("MASTER_ADDR")
    keep_queues_short(1e8)
    assert not list(tmp_path.iterdir())
