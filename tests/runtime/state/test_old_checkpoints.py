"""Checkpoints that an earlier version saved load as they did.

``tests/checkpoints`` has what ``save`` wrote on three ranks, and ``save_on_four`` on
four, with version 3 of a state_dict. The law: as many ranks get the bits that were
saved, and no other number of ranks loses a residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import gradwire as gw
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import exchange_for
from tests.runtime.meshes import HAS_REDUCE_SCATTER, device_mesh, mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import everything

pytestmark = pytest.mark.multi

SAVED = Path(str(files("tests"))) / "checkpoints"
SAVED_BY = 3
TOPK = exchange_for(gw.compress.topk(density=0.3))
EXCHANGES = {
    "momentum": gw.with_momentum_correction(gw.compress.topk(density=0.3)),
    "powersgd": exchange_for(gw.compress.powersgd(rank=1)),
    "draws": gw.with_error_feedback(
        gw.pair(gw.compress.qsgd(bitwidth=8), gw.collective.casync_ps())
    ),
}
SETTINGS = gw.Options(bucket_cap_mb=0.0001, compress_if=everything)
GATHERED = (*EXCHANGES, "local_steps")
BY_DCP = (*EXCHANGES, *(["reduce_scatter"] if HAS_REDUCE_SCATTER else []))
State = dict[str, Any]


class Training(NamedTuple):
    model: nn.Module
    handle: Any
    optimizer: torch.optim.Optimizer


def begun(name: str, world: int) -> Training:
    """A model whose gradients are averaged in one of the ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle: Any
    match name:
        case "local_steps":
            handle = gw.local_steps(model, optimizer, TOPK, every=3, options=SETTINGS)
        case "hosts":
            grid = mesh() if world == 4 else None
            handle = gw.attach(model, TOPK, mesh=grid, options=SETTINGS)
        case "replicas_of_shards":
            cut = device_mesh((2, world // 2), ("replicate", "shard"))
            fully_shard(model, mesh=cut["shard"])
            group: Any = cut["replicate"]
            handle = gw.attach(model, TOPK, group=group, options=SETTINGS)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        case "reduce_scatter":
            fully_shard(model, mesh=device_mesh((world,)))
            codec = gw.compress.topk(density=0.3)
            given = gw.Options(compress_if=everything)
            handle = gw.fsdp.reduce_scatter(model, codec, options=given)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        case _:
            handle = gw.attach(model, EXCHANGES[name], options=SETTINGS)
    return Training(model, handle, optimizer)


def trained(name: str, rank: int, world: int) -> Training:
    made = begun(name, world)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        made.optimizer.zero_grad()
        made.model(torch.randn(4, 7)).square().sum().backward()
        made.optimizer.step()
    return made


def save(rank: int, world: int, folder: str) -> None:
    """Saves all ways of three ranks."""
    for name in (*GATHERED, "reduce_scatter"):
        handle = trained(name, rank, world).handle
        if name != "local_steps":
            state = {"exchange": handle.sharded_state()}
            dcp.save(state, checkpoint_id=f"{folder}/{name}")
        if name in GATHERED:
            save_gathered(handle, rank, f"{folder}/{name}.pt")
        else:
            torch.save(handle.state_dict(), f"{folder}/{name}-{rank}.pt")
        handle.detach()


def save_on_four(rank: int, world: int, folder: str) -> None:
    """Saves all ways of four ranks."""
    handle = trained("hosts", rank, world).handle
    save_gathered(handle, rank, f"{folder}/hosts.pt")
    handle.detach()
    name = "replicas_of_shards"
    handle = trained(name, rank, world).handle
    state = {"exchange": handle.sharded_state()}
    dcp.save(state, checkpoint_id=f"{folder}/{name}")
    torch.save(handle.state_dict(), f"{folder}/{name}-{rank}.pt")
    handle.detach()


def save_gathered(handle: Any, rank: int, path: str) -> None:
    state = handle.gather_state()
    if rank == 0:
        torch.save(state, path)


def read(name: str) -> Any:
    return torch.load(SAVED / f"{name}.pt", weights_only=True)


def old_states(name: str) -> list[State]:
    """The state of each old rank, in rank order."""
    if (SAVED / f"{name}.pt").is_file():
        return list(read(name).values())
    return [read(path.stem) for path in sorted(SAVED.glob(f"{name}-*.pt"))]


def load(rank: int, world: int, names: Iterable[str], saved_by: int) -> list[State]:
    """A rank's state after it loaded each way.

    Through ``torch.distributed.checkpoint`` if ``saved_by`` replicas saved, else from
    one file.
    """
    found = []
    for name in names:
        handle = begun(name, world).handle
        if saved_by:
            state = {"exchange": handle.sharded_state(saved_by=saved_by)}
            dcp.load(state, checkpoint_id=SAVED / name)
            handle.load_state_dict(state["exchange"])
        else:
            handle.load_state_dict(read(name))
        found.append(handle.state_dict())
        handle.detach()
    return found


def forgets(rank: int, world: int, names: Iterable[str]) -> list[str]:
    """The errors where nobody says how many replicas saved."""
    told = []
    for name in names:
        handle = begun(name, world).handle
        before = handle.state_dict()
        state = {"exchange": handle.sharded_state()}
        dcp.load(state, checkpoint_id=SAVED / name)
        with pytest.raises(InvalidSetting) as raised:
            handle.load_state_dict(state["exchange"])
        assert_same(handle.state_dict(), before, name)
        told.append(str(raised.value))
        handle.detach()
    return told


def test_the_number_of_replicas_is_told_where_it_was_left_out(two: Ranks) -> None:
    names = ("momentum", *(["reduce_scatter"] if HAS_REDUCE_SCATTER else []))
    for told in two.run(forgets, names):
        for text in told:
            assert "must be 3, as many as were saved, got 2; " in text
            assert "load into handle.sharded_state(saved_by=3)" in text


def of_another_shape(rank: int, world: int) -> str:
    """The error of torch where a parameter is wider than the saved one."""
    model = nn.Sequential(nn.Linear(7, 12))
    handle = gw.attach(model, EXCHANGES["momentum"], options=SETTINGS)
    state = {"exchange": handle.sharded_state(saved_by=SAVED_BY)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, checkpoint_id=SAVED / "momentum")
    handle.detach()
    return str(raised.value)


def test_parameters_of_another_shape_are_not_read(two: Ranks) -> None:
    for told in two.run(of_another_shape):
        assert "Size mismatch between saved torch.Size([3, 11, 7])" in told


def assert_same(found: Any, saved: Any, what: str) -> None:
    """The same bits in the same places, but for the name of the run."""
    if isinstance(saved, dict):
        assert found.keys() == saved.keys(), what
        for key in saved.keys() - {"run"}:
            assert_same(found[key], saved[key], f"{what}, {key}")
    elif isinstance(saved, Tensor):
        assert found.dtype == saved.dtype, what
        assert torch.equal(found, saved), what
    else:
        assert found == saved, what


WORLDS = (
    2,
    SAVED_BY,
    pytest.param(5, marks=pytest.mark.slow),
    pytest.param(7, marks=pytest.mark.slow),
)


@pytest.mark.parametrize("by_dcp", [False, True], ids=["one file", "dcp"])
@pytest.mark.parametrize("world", WORLDS)
def test_any_number_of_ranks_loads_what_three_saved(
    world: int, by_dcp: bool, ranks_of: Callable[[int], Ranks]
) -> None:
    names = BY_DCP if by_dcp else GATHERED
    for rank, states in enumerate(
        ranks_of(world).run(load, names, SAVED_BY if by_dcp else 0)
    ):
        for name, found in zip(names, states, strict=True):
            olds = old_states(name)
            what = f"{name} on rank {rank} of {world}"
            if world == SAVED_BY:
                assert_same(found, olds[rank], what)
                continue
            most = -(-SAVED_BY // world)
            mine = olds[rank::world]
            if by_dcp:
                mine = olds[rank * most : (rank + 1) * most]
            assert_owed(found, mine, olds[rank % SAVED_BY], world / SAVED_BY, what)


def assert_owed(
    found: State, mine: list[State], donor: State, factor: float, what: str
) -> None:
    """A rank has the residuals of old ranks, and all else from one of them."""
    assert found["step"] == donor["step"]
    assert found["params"].keys() == donor["params"].keys()
    for name, fields in donor["params"].items():
        for path, old in fields.items():
            held = found["params"][name][path]
            if path.endswith("_N"):
                parts = [one["params"][name][path].double() for one in mine]
                old = factor * sum(parts, torch.zeros_like(old).double())
            assert_close(held, old.to(held.dtype), msg=f"{what}, {path} of {name}")
    for name, fields in found["messages"].items():
        for path, held in fields.items():
            old = donor["messages"].get(name, {}).get(path)
            if old is not None and old.shape == held.shape:
                assert torch.equal(held, old), f"{what}, {path} of {name}"
    for name, anchor in donor.get("outer", {}).get("anchors", {}).items():
        assert torch.equal(found["outer"]["anchors"][name], anchor)


def load_on_four(rank: int, world: int) -> list[State]:
    return [
        *load(rank, world, ["hosts"], 0),
        *load(rank, world, ["replicas_of_shards"], 2),
    ]


def test_hosts_and_shards_load_what_they_saved(four: Ranks) -> None:
    names = ["hosts", "replicas_of_shards"]
    for rank, states in enumerate(four.run(load_on_four)):
        for name, found in zip(names, states, strict=True):
            assert_same(found, old_states(name)[rank], f"{name} on rank {rank}")


def test_ranks_of_their_own_load_what_hosts_saved(two: Ranks) -> None:
    olds = old_states("hosts")
    for rank, (found,) in enumerate(two.run(load, ["hosts"], 0)):
        mine = olds[2 * rank : 2 * rank + 2]
        assert_owed(found, mine, olds[0], 1.0, f"rank {rank}")
