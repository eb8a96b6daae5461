"""Rank 0 may be lost where it does not hold the store; a lost store is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import gradwire as gw
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.survive.test_shrink import die
from tests.runtime.training import SMALL_MB, TOPK, Net, digest, loss_of, momentum

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(240)]
LIMIT = timedelta(seconds=60)
EXAMPLE = Path(__file__).parents[3] / "examples" / "with_restarts.py"
NUM_STEPS = 5
WORLD = 3
held: list[dist.TCPStore] = []


def hold(rank: int, world: int) -> int:
    """Holds a store from now on, as the agent of torchrun does; returns its port."""
    held.append(dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False))
    return held[-1].port


def attached(port: int, on_failure: str) -> tuple[Net, gw.Handle, dist.TCPStore]:
    net = Net()
    store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    given = keywords(
        bucket_cap_mb=SMALL_MB, timeout=LIMIT, on_failure=on_failure, store=store
    )
    return net, gw.attach(net, TOPK, **given), store


def outlives(rank: int, world: int, port: int) -> tuple[Any, ...]:
    """Trains on; rank 0, which holds the default group's store, dies before step 2."""
    net, handle, _ = attached(port, "shrink")
    optimizer = momentum(net.parameters())
    lost = []
    for step in range(NUM_STEPS):
        if (rank, step) == (0, 2):
            die()
        while True:
            try:
                optimizer.zero_grad()
                loss_of(net, rank, step).backward()
                break
            except gw.RanksLost as error:
                lost.append(error.ranks)
        optimizer.step()
    found = lost, handle.step, handle.world_size, handle.rank, digest(net)
    handle.detach()
    return found


def test_a_store_beside_the_ranks_outlives_rank_0(
    ranks_of: Callable[[int], Ranks],
) -> None:
    (port,) = ranks_of(1).run(hold)
    ranks = ranks_of(WORLD)
    ranks.send(outlives, port)
    one, other = ranks.survivors({0})
    assert one[:3] == other[:3] == ([(0,)], NUM_STEPS, WORLD - 1)
    assert (one[3], other[3]) == (0, 1)
    assert one[4] == other[4]


def ends(rank: int, world: int, port: int, on_failure: str) -> tuple[Any, ...]:
    """Trains until an error says that it cannot."""
    net, _, store = attached(port, on_failure)
    step = 0
    try:
        while True:
            loss_of(net, rank, step).backward()
            store.add("steps", not step)
            step += 1
    except gw.RankFailed as error:
        return type(error).__name__, error.ranks, error.exit_code, str(error)
    except dist.DistError:  # of the test's own question
        try:
            while True:
                loss_of(net, rank, step).backward()
        except gw.RankFailed as error:
            return type(error).__name__, error.ranks, error.exit_code, str(error)


@each("on_failure", ["end", "shrink"])
def test_the_loss_of_a_store_beside_the_ranks_is_named_on_all(
    on_failure: str, ranks_of: Callable[[int], Ranks]
) -> None:
    """All ranks live, and no rank is named."""
    host = ranks_of(1)
    (port,) = host.run(hold)
    ranks = ranks_of(WORLD)
    ranks.send(ends, port, on_failure)
    store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    while store.add("steps", 0) < WORLD:
        pass
    host.kill(0)
    for kind, named, code, text in ranks.survivors(()):
        assert (kind, named, code) == ("RankFailed", (), gw.errors.ExitCode.UNAVAILABLE)
        assert "the job's store stopped answering, though rank 0 of 3 does" in text


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_torchrun_starts_a_job_again_whose_rank_0_was_killed(tmp_path: Path) -> None:
    """Its agent holds the store, with all that the dead ranks have left there."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("--max-restarts", "2", str(EXAMPLE), "--folder", str(tmp_path)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    resumed = re.findall(r"rank (\d): start 1 goes on from step 40", done.stdout)
    assert sorted(resumed) == ["0", "1"], done.stdout
    loss = re.search(r"loss ([0-9.]+) after 100 steps", done.stdout)
    assert loss is not None, done.stdout
    assert float(loss[1]) < 2.0
