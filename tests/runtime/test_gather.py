"""One file holds the state of all ranks: gathered on rank 0, loaded among any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import gradwire as gw
from gradwire.errors import RankFailed, RanksDiffer
from gradwire.runtime.handle import Handle
from gradwire.runtime.state import joint_call
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import TOPK, Net, adamw, ddp, digest, train

pytestmark = pytest.mark.multi


def attached() -> tuple[Net, Handle]:
    net = Net()
    return net, gw.attach(net, TOPK, options=SMALL)


def trained(rank: int) -> tuple[Net, Handle, Any]:
    net, handle = attached()
    optimizer = adamw(net.parameters())
    train(net, optimizer, rank, range(3))
    return net, handle, optimizer


def saved_on_rank_0(rank: int, world: int, path: str) -> str:
    """As a loop that saves on rank 0 alone does; returns what training on ends in."""
    net, handle, optimizer = trained(rank)
    state = {"gradwire": handle.gather_state()}
    if rank == 0:
        parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**parts, **state}, path)
    else:
        assert state == {"gradwire": {}}
    train(net, optimizer, rank, range(3, 6))
    return digest([*net.parameters(), *handle.residuals().values()])


def resumed(rank: int, world: int, path: str) -> tuple[str, dict[str, torch.Tensor], int]:
    found = torch.load(path, weights_only=True)
    net, handle = attached()
    optimizer = adamw(net.parameters())
    net.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    handle.load_state_dict(found["gradwire"])
    owed = handle.residuals()
    train(net, optimizer, rank, range(3, 6))
    return digest([*net.parameters(), *handle.residuals().values()]), owed, handle.step


def test_one_file_serves_any_number_of_ranks(two: Ranks, four: Ranks, tmp_path: Path) -> None:
    """Among as many ranks as before a resumed run is the uninterrupted one."""
    path = str(tmp_path / "all.pt")
    whole = two.run(saved_on_rank_0, path)
    for own, (again, _, step) in zip(whole, two.run(resumed, path), strict=True):
        assert (again, step) == (own, 6)
    state = torch.load(path, weights_only=True)["gradwire"]
    assert [*state] == ["rank 0 of 2", "rank 1 of 2"]
    owed = [old["params"] for old in state.values()]
    of_four = [owed for _, owed, _ in four.run(resumed, path)]
    for name in of_four[0]:
        pending = sum(old[name]["residual_N"] for old in owed) / 2
        assert bool(pending.any())
        torch.testing.assert_close(sum(new[name] for new in of_four) / 4, pending)


def through_dcp(rank: int, world: int, folder: str) -> None:
    net, handle, _ = trained(rank)
    state = {"model": net, f"gradwire {rank}": handle}
    dcp.save(state, checkpoint_id=folder)
    before, owed = digest(net), handle.residuals()
    handle.detach()
    net, handle = attached()
    dcp.load({"model": net, f"gradwire {rank}": handle}, checkpoint_id=folder)
    assert (digest(net), handle.step) == (before, 3)
    found = handle.residuals()
    assert all(torch.equal(owed[name], found[name]) for name in owed)


def test_a_distributed_checkpoint_keeps_each_ranks_own(two: Ranks, tmp_path: Path) -> None:
    two.run(through_dcp, str(tmp_path / "dcp"))


def crossed(rank: int, world: int) -> tuple[str, list[str]]:
    """Rank 1 loads while rank 0 gathers; then all is as it was. What DDP averages itself has no
    channels, and a state all the same."""
    net, handle, optimizer = trained(rank)
    state = handle.state_dict()
    with pytest.raises(RanksDiffer) as raised:
        handle.load_state_dict(state) if rank else handle.gather_state()
    train(net, optimizer, rank, range(3, 4))
    handle.detach()
    handle = gw.attach(ddp(Net(), broadcast_buffers=False), "none")
    state = handle.gather_state()
    handle.load_state_dict(state or handle.state_dict())
    handle.detach()
    return str(raised.value), list(state)


def test_two_calls_at_once_are_refused_by_name(two: Ranks) -> None:
    found = two.run(crossed)
    for told, _ in found:
        assert "call is gather_state() against load_state_dict()" in told
    assert [names for _, names in found] == [["rank 0 of 2", "rank 1 of 2"], []]


def one_dies(rank: int, world: int) -> tuple[tuple[int, ...], str]:
    _, handle, _ = trained(rank)
    if rank == 2:
        joint_call.send = lambda *_: os._exit(3)
    with pytest.raises(RankFailed) as raised:
        handle.gather_state()
    return raised.value.ranks, str(raised.value)


@pytest.mark.slow
def test_a_rank_that_dies_while_states_travel_is_named(doomed: Ranks) -> None:
    doomed.send(one_dies)
    for rank, (value, error, _) in enumerate(doomed.collect(60.0, without=[2])):
        if rank != 2:
            assert error is None, error
            assert value[0] == (2,)
            assert "step 3 cannot be finished: rank 2 of 4 stopped answering" in value[1]
