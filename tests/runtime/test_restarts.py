"""A job that torchrun starts again finds the store as the dead ranks have left it."""

from __future__ import annotations

import pytest

import gradwire as gw
from gradwire.errors import RankFailed
from gradwire.runtime.failure import membership
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import TOPK, Net, adamw, digest, train

pytestmark = pytest.mark.multi


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
