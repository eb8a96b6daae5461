"""A job that torchrun starts again finds the store as the dead ranks have left it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.errors import RankFailed
from gradwire.runtime.failure import membership
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import TOPK, Net, adamw, digest, train

pytestmark = [pytest.mark.multi, pytest.mark.slow]
ROOT = Path(__file__).parent.parent.parent


def until_told(handle: gw.Handle) -> None:
    while True:
        handle._engine.check()


def started_again(rank: int, world: int) -> str:
    """The second start of these ranks, as its first attach has the names of the first start's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        patch.setattr(membership, "_JOINED", type(membership._JOINED)())
        patch.setattr(membership, "_ROLLS", {})
        handle = gw.attach(Net(), TOPK, options=SMALL)
        if rank == 1:
            handle._engine.give_up("a test gave up")
        with pytest.raises(RankFailed, match="a test gave up"):
            until_told(handle)
        handle.detach()
        membership._JOINED.clear()
        membership._ROLLS.clear()
        # Agents of several hosts do not count alike.
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(rank))
        net = Net(rank)
        handle = gw.attach(net, TOPK, options=SMALL)
        train(net, adamw(net.parameters()), rank, range(3))
        handle.detach()
        return digest(net)


def test_notes_and_alarms_of_ranks_that_are_gone_are_not_read(two: Ranks) -> None:
    one, other = two.run(started_again)
    assert one == other


@pytest.mark.parametrize("shares_store", [True, False], ids=["prefix", "own store"])
def test_torchrun_restarts_a_job_from_its_checkpoint(tmp_path: Path, shares_store: bool) -> None:
    """By both forms of the page on failures; in the agent's store plain torch meets the dead."""
    own = {} if shares_store else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    often = ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    program = ["-m", "tests.runtime.restarted", str(tmp_path)]
    command, env = [*torchrun, *often, *program], {**os.environ, **own}
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    for rank in range(2):
        text = (tmp_path / f"rank-{rank}").read_text()
        assert text == "start 1 began at 3, same bits: True"
