"""``gw.fsdp.reduce_scatter``: encoded payloads in the place of FSDP2's
reduce-scatter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire as gw
from gradwire.errors import InvalidSetting, RanksDiffer
from tests.each import few
from tests.runtime.meshes import device_mesh, needs_reduce_scatter
from tests.runtime.ranks import Ranks
from tests.runtime.state.test_sharded import held
from tests.runtime.training import digest

pytestmark = [pytest.mark.multi, needs_reduce_scatter]

TOPK, UNIFORM = gw.compress.topk(density=0.2), gw.compress.uniform(bitwidth=4)
DRAWN = gw.compress.terngrad()


class Net(nn.Module):
    """Layers of odd sizes; one is used only by those who say so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.seldom = nn.Linear(13, 37), nn.Linear(13, 37)
        self.last = nn.Linear(37, 3)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        hidden = self.first(x) + self.seldom(x) if both else self.first(x)
        return self.last(torch.tanh(hidden))  # type: ignore[no-any-return]


def sharded(world: int, **settings: Any) -> Any:
    net, mesh = Net(), device_mesh((world,))
    fully_shard(net.first, mesh=mesh, **settings)
    return fully_shard(net, mesh=mesh, **settings)


def train(net: Any, optimizer: torch.optim.SGD, rank: int, steps: range) -> float:
    loss = torch.zeros(())
    for step in steps:
        torch.manual_seed(100 * step + rank)
        x = torch.randn(16, 13)
        optimizer.zero_grad()
        loss = (net(x) - x[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss)


def momentum(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def like_native(
    rank: int, world: int
) -> tuple[list[Tensor], list[Tensor], list[str], int]:
    """Shards of gradients, by FSDP itself and through none; the bits of a run of two
    losses.
    """
    found, digests = [], []
    for ours in (False, True, True):
        net = sharded(world)
        # as without, ranks would not send alike
        net.set_reduce_scatter_unused_params(True)
        handle = gw.fsdp.reduce_scatter(net, "none") if ours else None
        torch.manual_seed(rank)
        net(torch.randn(8, 13), rank == 0).square().sum().backward()
        found.append(
            [p.grad.to_local().clone() for p in net.parameters() if p.grad is not None]
        )
        train(net, momentum(net), rank, range(3))
        digests.append(digest(held(net)))
    assert handle is not None
    assert handle._channels[0].ahead_bytes, "no part went straight to its rank"
    handle.detach()
    train(net, momentum(net), rank, range(3, 4))
    return found[0], found[1], digests[1:], handle.step


def test_none_reduces_as_fsdp_does(four: Ranks) -> None:
    for native, own, (once, again), steps in four.run(like_native):
        assert len(own) == len(native) == 6
        for a, b in zip(native, own, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
        assert once == again, "sums are made in one order"
        assert steps == 4, "detach() gives FSDP its own back"


def conserved(rank: int, world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(sum of gradients, W x mean, sum of residuals) of each parameter after two
    passes.
    """
    nets = [sharded(world), sharded(world)]
    handle = gw.fsdp.reduce_scatter(nets[1], TOPK)
    sums: list[dict[str, Tensor]] = [{}, {}]
    for step in range(2):
        for net, total in zip(nets, sums, strict=True):
            torch.manual_seed(10 * step + rank)
            net.zero_grad()
            net(torch.randn(8, 13)).square().sum().backward()
            for key, param in net.named_parameters():
                total[key] = total.get(key, 0) + world * param.grad.full_tensor()
    found = []
    for key, left in handle.residuals().items():
        dist.all_reduce(left)
        found.append((sums[0][key].flatten(), sums[1][key].flatten(), left))
    handle.detach()
    return found


def test_a_reduce_scatter_keeps_in_residuals_what_did_not_arrive(four: Ranks) -> None:
    for found in four.run(conserved):
        assert len(found) == 3, "three matrices"
        assert all(left.any() for _, _, left in found)
        for total, arrived, left in found:
            torch.testing.assert_close(arrived + left, total, rtol=1e-4, atol=1e-5)


def accounted(rank: int, world: int, codec: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What ``conserved`` returns, of steps that a scaler takes; its scale changes by 8.

    The losses of one rank are infinite in some steps. Two passes may be one step.
    """
    nets = [sharded(world), sharded(world)]
    scaler = GradScaler("cpu", init_scale=2.0**6, growth_factor=8.0, growth_interval=1)
    handle = gw.fsdp.reduce_scatter(nets[1], codec, scaler=scaler)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]
    sums: list[dict[str, Tensor]] = [{}, {}]
    for step, passes in enumerate([(0,), (1,), (0,), (0, 1), (0, 0), (1, 0), (0,)]):
        for place, infinite in enumerate(passes):
            for net, scale in zip(nets, (1.0, scaler.get_scale()), strict=True):
                torch.manual_seed(100 * step + 10 * place + rank)
                loss = net(torch.randn(8, 13)).square().sum()
                loss = loss * torch.inf if infinite and not rank else loss
                (loss if scale == 1.0 else scaler.scale(loss)).backward()
        before = scaler.get_scale()
        scaler.step(optimizers[1])
        scaler.update()
        for net, total in zip(nets, sums, strict=True):
            for key, param in net.named_parameters():
                grad = world * param.grad.full_tensor()  # the scaler has unscaled it
                if scaler.get_scale() > before:
                    total[key] = total.get(key, 0) + grad
            net.zero_grad()
    found = []
    for key, left in handle.residuals().items():
        dist.all_reduce(left)
        found.append((sums[0][key].flatten(), sums[1][key].flatten(), left))
    handle.detach()
    assert sorted(vars(scaler)) == sorted(vars(GradScaler("cpu")))
    return found


@few("codec", [TOPK, gw.compress.onebit(block=64)], ids=str)
def test_nothing_is_lost_under_a_scaler_that_skips(codec: Any, two: Ranks) -> None:
    for found in two.run(accounted, codec):
        assert all(left.any() for _, _, left in found)
        for total, arrived, left in found:
            torch.testing.assert_close(arrived + left, total, rtol=1e-4, atol=1e-3)


def beside_a_scaler(rank: int, world: int) -> list[str]:
    """The errors of a first backward pass beside a strange scaler, and of parameters in
    16 bits.
    """
    texts = []
    net, scaler = sharded(world), GradScaler("cpu")
    for given in (None, GradScaler("cpu", enabled=False)):
        handle = gw.fsdp.reduce_scatter(net, TOPK, scaler=given)
        try:
            scaler.scale(net(torch.randn(8, 13)).sum()).backward()
            texts.append("")
        except InvalidSetting as error:
            texts.append(str(error))
        handle.detach()
        net = sharded(world)
    mesh = device_mesh((world,))
    half = fully_shard(nn.Linear(13, 8).half(), mesh=mesh)
    with pytest.raises(InvalidSetting) as raised:
        gw.fsdp.reduce_scatter(half, TOPK, scaler=scaler)
    texts.append(str(raised.value))
    return texts


def test_a_scaler_that_was_not_given_is_refused(two: Ranks) -> None:
    for strange, named, half in two.run(beside_a_scaler):
        assert "scaler must be the scaler of the model's loss" in strange
        assert "None beside a GradScaler with the scale 65536" in strange
        assert named == ""
        assert "dtype of weight must be torch.float32 beside a scaler" in half


def resumed(
    rank: int, world: int, folder: str
) -> list[tuple[str, str, str, bool, int]]:
    """For each codec the bits of one run, and of runs that went on with each kind of
    state.
    """
    return [
        goes_on(rank, world, codec, f"{folder}/{type(codec).__name__}")
        for codec in (TOPK, DRAWN)
    ]


def goes_on(
    rank: int, world: int, codec: Any, folder: str
) -> tuple[str, str, str, bool, int]:
    net = sharded(world)
    handle, optimizer = gw.fsdp.reduce_scatter(net, codec), momentum(net)
    first = train(net, optimizer, rank, range(1))
    train(net, optimizer, rank, range(1, 3))
    saved, values = handle.state_dict(), [shard.clone() for shard in held(net)]
    dcp.save({"gradwire": handle.sharded_state()}, checkpoint_id=folder)
    moments = [
        optimizer.state[p]["momentum_buffer"].to_local().clone()
        for p in net.parameters()
    ]
    loss, found = train(net, optimizer, rank, range(3, 20)), [digest(held(net))]
    wire_bytes = handle.stats()["wire_bytes_per_step"]
    handle.detach()
    for from_folder in (False, True):
        again = sharded(world)
        other, optimizer = gw.fsdp.reduce_scatter(again, codec), momentum(again)
        train(again, optimizer, rank, range(1))
        with torch.no_grad():
            for shard, value in zip(held(again), values, strict=True):
                shard.copy_(value)
            for p, moment in zip(again.parameters(), moments, strict=True):
                optimizer.state[p]["momentum_buffer"].to_local().copy_(moment)
        state = {"gradwire": other.sharded_state()}
        if from_folder:
            dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["gradwire"] if from_folder else saved)
        train(again, optimizer, rank, range(3, 20))
        found.append(digest(held(again)))
        other.detach()
    return found[0], found[1], found[2], loss < 0.7 * first, int(wire_bytes)


def test_it_trains_and_goes_on_with_the_same_bits(two: Ranks, tmp_path: Path) -> None:
    dense_bytes = 4 * 13 * 37 * 2  # at least, of half the gradient
    for of_rank in two.run(resumed, str(tmp_path)):
        for whole, again, from_folder, has_learnt, wire_bytes in of_rank:
            assert again == whole
            assert from_folder == whole
            assert has_learnt
            assert 0 < wire_bytes < dense_bytes / 2


def between_one_and_two(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    """The owed mean of each parameter where two ranks saved, one went on, and two did
    again.
    """

    def owed(handle: Any, num_ranks: int) -> dict[str, Tensor]:
        found = {name: left / num_ranks for name, left in handle.residuals().items()}
        for left in found.values() if num_ranks > 1 else ():
            dist.all_reduce(left)
        return found

    net, apart = sharded(world), device_mesh((world, 1), ("apart", "own"))["own"]
    handle = gw.fsdp.reduce_scatter(net, TOPK)
    train(net, momentum(net), rank, range(3))
    dcp.save({"gradwire": handle.sharded_state()}, checkpoint_id=folder)
    alone = gw.fsdp.reduce_scatter(fully_shard(Net(), mesh=apart), TOPK)
    state = {"gradwire": alone.sharded_state(saved_by=2)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    alone.load_state_dict(state["gradwire"])
    found = [owed(handle, 2), owed(alone, 1)]
    if not rank:
        dcp.save(
            {"gradwire": alone.sharded_state()},
            checkpoint_id=f"{folder}/1",
            no_dist=True,
        )
    dist.barrier()
    state = {"gradwire": handle.sharded_state(saved_by=1)}
    dcp.load(state, checkpoint_id=f"{folder}/1")
    handle.load_state_dict(state["gradwire"])
    found.append(owed(handle, 2))
    handle.detach()
    alone.detach()
    return found


def test_one_rank_goes_on_where_two_saved_and_two_where_one_did(
    two: Ranks, tmp_path: Path
) -> None:
    for saved, alone, again in two.run(between_one_and_two, str(tmp_path)):
        assert any(left.any() for left in saved.values())
        for name, left in saved.items():
            torch.testing.assert_close(alone[name], left)
            torch.testing.assert_close(again[name], left)


def wrong(rank: int, world: int) -> list[str]:
    reported: list[str] = []

    def refused(model: Any, algorithm: Any = UNIFORM) -> None:
        with pytest.raises(InvalidSetting) as raised:
            gw.fsdp.reduce_scatter(model, algorithm)
        reported.append(str(raised.value))

    refused(Net())
    refused(sharded(world), gw.compress.powersgd())
    mesh = device_mesh((2, 2), ("replicate", "shard"))
    refused(fully_shard(Net(), mesh=mesh))
    partly = Net()
    fully_shard(partly.first, mesh=device_mesh((world,)))
    refused(partly)
    net = sharded(world)
    handle = gw.fsdp.reduce_scatter(net, UNIFORM)
    refused(net)
    with pytest.raises(InvalidSetting) as raised:
        handle.load_state_dict({**handle.state_dict(), "rank": (rank + 1) % world})
    reported.append(str(raised.value))
    handle.detach()
    halves = sharded(world, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    handle = gw.fsdp.reduce_scatter(halves, UNIFORM)
    with pytest.raises(InvalidSetting) as raised:
        train(halves, momentum(halves), rank, range(1))
    reported.append(str(raised.value))
    handle.detach()
    with pytest.raises(RanksDiffer) as differ:
        gw.fsdp.reduce_scatter(
            sharded(world), gw.compress.uniform(bitwidth=4 if rank else 8)
        )
    return [*reported, str(differ.value)]


def test_wrong_models_and_settings_are_refused_with_the_remedy(four: Ranks) -> None:
    for reported in four.run(wrong):
        plain, exchange, hybrid, partly, twice, other, halves, differ = reported
        assert "apply fully_shard() first, or use gw.attach" in plain
        assert (
            "a compressor or its name, as a reduce-scatter has only one direction"
            in exchange
        )
        assert "group=mesh['replicate']" in hybrid
        assert "last.bias is trained and outside of what fully_shard() holds" in partly
        assert "is taken already; detach() it first" in twice
        assert "this state was saved by rank" in other
        assert "MixedPrecisionPolicy(reduce_dtype=torch.float32)" in halves
        assert "algorithm is" in differ
