"""``sharded_state``: torch.distributed.checkpoint saves it, and cuts it anew for other
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import exchange_for
from gradwire.runtime.handle import Handle
from tests.runtime.given import SMALL
from tests.runtime.meshes import device_mesh, mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, TOPK, digest, train

pytestmark = pytest.mark.multi

EXCHANGES = {
    "topk": TOPK,
    "starts": exchange_for(
        gw.compress.powersgd(rank=1)
    ),  # counts steps, and keeps matrices
}


def made(
    grid: tuple[int, int], exchange: Exchange
) -> tuple[nn.Module, Handle, torch.optim.SGD]:
    """A model on a grid of (replicas, shards), with odd sizes; one shard is a plain
    model.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 5))
    group: Any = None
    if grid[1] > 1:
        cut = device_mesh(grid, ("replicate", "shard"))
        fully_shard(net, mesh=cut["shard"])
        group = cut["replicate"]
    handle = gw.attach(net, exchange, group=group, options=SMALL)
    return net, handle, torch.optim.SGD(net.parameters(), lr=0.05)


def held(net: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [p.to_local() if isinstance(p, DTensor) else p for p in net.parameters()]


def resumed(
    rank: int, world: int, parts: int, name: str, folder: str
) -> tuple[str, str]:
    """The bits of a whole run, and of one that goes on from its checkpoint."""
    grid = world // parts, parts
    net, handle, optimizer = made(grid, EXCHANGES[name])
    train(net, optimizer, rank, range(3))
    state = {"model": net.state_dict(), "gradwire": handle.sharded_state()}
    dcp.save(state, checkpoint_id=folder)
    train(net, optimizer, rank, range(3, 6))
    whole = digest(held(net))
    handle.detach()

    again, other, optimizer = made(grid, EXCHANGES[name])
    state = {"model": again.state_dict(), "gradwire": other.sharded_state()}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["gradwire"])
    assert other.step == 3
    train(again, optimizer, rank, range(3, 6))
    found = digest(held(again))
    other.detach()
    return whole, found


@pytest.mark.parametrize(
    ("parts", "name"), [(2, "topk"), pytest.param(1, "starts", marks=pytest.mark.slow)]
)
def test_a_run_in_two_parts_is_one_run(
    parts: int, name: str, four: Ranks, tmp_path: Path
) -> None:
    for whole, found in four.run(resumed, parts, name, str(tmp_path)):
        assert found == whole


def totals(handle: Handle) -> dict[str, float]:
    """The sum of all residuals that the mean over replicas is still to deliver, by
    parameter.
    """
    found, residuals = {}, handle.residuals()
    for name in ("0.weight", "2.weight"):
        total = residuals.get(name, torch.zeros(0)).double().sum() / handle.world_size
        dist.all_reduce(total)
        found[name] = float(total)
    return found


def save(rank: int, world: int, parts: int, folder: str) -> dict[str, float]:
    net, handle, optimizer = made((world // parts, parts), TOPK)
    train(net, optimizer, rank, range(3))
    dcp.save({"gradwire": handle.sharded_state()}, checkpoint_id=folder)
    found = totals(handle)
    handle.detach()
    return found


def load(
    rank: int, world: int, parts: int, saved_by: int, folder: str
) -> dict[str, float]:
    net, handle, optimizer = made((world // parts, parts), TOPK)
    state = {"gradwire": handle.sharded_state(saved_by=saved_by)}
    dcp.load(state, checkpoint_id=folder)
    handle.load_state_dict(state["gradwire"])
    found = totals(handle)
    assert handle.step == 3
    train(net, optimizer, rank, range(3, 5))
    handle.detach()
    return found


@pytest.mark.slow
def test_other_ranks_and_shards_lose_nothing(
    four: Ranks, two: Ranks, tmp_path: Path
) -> None:
    """Four ranks in two parts save, then four in four parts go on, and two in two.

    Four replicas save, then two replicas of two parts go on: each is given the rows of
    two.
    """
    for old, goes_on in ((2, ((four, 4), (two, 2))), (1, ((four, 2),))):
        folder = str(tmp_path / f"{old} parts")
        saved = four.run(save, old, folder)[0]
        assert saved["0.weight"] != 0
        for ranks, parts in goes_on:
            found = ranks.run(load, parts, 4 // old, folder)[0]
            assert found == pytest.approx(saved, rel=1e-5, abs=1e-7)


def wrong(rank: int, world: int, folder: str) -> list[str]:
    reported = []
    net, handle, optimizer = made((2, 2), TOPK)
    train(net, optimizer, rank, range(2))
    dcp.save({"gradwire": handle.sharded_state()}, checkpoint_id=folder)
    with pytest.raises(InvalidSetting) as raised:
        handle.sharded_state(saved_by=0)
    reported.append(str(raised.value))
    state = handle.sharded_state(saved_by=3)
    with pytest.raises(InvalidSetting) as raised:
        handle.load_state_dict(state)  # nothing was loaded into it: it says 2
    reported.append(str(raised.value))
    handle.detach()
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for other in (
        gw.local_steps(plain, optimizer, "none", every=2, quorum=1),
        gw.attach(nn.Linear(4, 4), DENSE, mesh=mesh()),
        gw.attach(nn.Linear(4, 4), "auto"),
    ):
        with pytest.raises(InvalidSetting) as raised:
            other.sharded_state()
        reported.append(str(raised.value))
        other.detach()
    return reported


def test_what_cannot_be_cut_is_refused(four: Ranks, tmp_path: Path) -> None:
    for saved_by, rows, *others in four.run(wrong, str(tmp_path)):
        assert "saved_by must be a whole number, 1 to 2**24" in saved_by
        assert "handle.sharded_state(saved_by=2)" in rows
        for text in others:
            assert "save what gather_state() returns" in text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_to_load_into_is_none_to_save(tmp_path: Path) -> None:
    """It holds no residual, so a checkpoint of it is refused."""
    handle = gw.attach(nn.Linear(7, 3), TOPK)
    dcp.save({"exchange": handle.sharded_state(saved_by=2)}, checkpoint_id=tmp_path)
    for saved_by, said in ((None, "must be finite, got nan"), (2, "rows of residual")):
        state = {"exchange": handle.sharded_state(saved_by=saved_by)}
        dcp.load(state, checkpoint_id=tmp_path)
        with pytest.raises(InvalidSetting, match=said):
            handle.load_state_dict(state["exchange"])
    handle.detach()


def test_complex_parameters_are_kept_as_reals() -> None:
    net = nn.Module()
    net.weight = nn.Parameter(torch.randn(40, 30, dtype=torch.complex64))
    handle = gw.attach(net, gw.compress.topk(density=0.1))
    net.weight.abs().square().sum().backward()
    state = handle.state_dict()
    for field in state["params"]["weight"].values():
        field.normal_()
    handle.load_state_dict(state)
    owed = handle.residuals()["weight"]
    saved = handle.sharded_state()
    handle.load_state_dict(saved)
    assert owed.any()
    assert torch.equal(handle.residuals()["weight"], owed)
    handle.detach()
