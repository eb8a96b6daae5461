"""Sharded models: shards of gradients are exchanged among the ranks that hold the
same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import gradwire as gw
from gradwire.errors import InvalidSetting, RankFailed, RanksDiffer
from gradwire.runtime.handle import Handle
from gradwire_lab.compress.sharded_dgc import sharded_dgc
from tests.each import sampled
from tests.runtime.given import SMALL, keywords
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import Ranks
from tests.runtime.state.test_sharded import held
from tests.runtime.training import (
    DENSE,
    ONEBIT,
    SMALL_MB,
    TOPK,
    Net,
    digest,
    loss_of,
    momentum,
    train,
)

pytestmark = pytest.mark.multi


def grid(names: tuple[str, str] = ("replicate", "shard")) -> DeviceMesh:
    """Two replicas of two shards: rank 2 * r + s holds shard s of replica r."""
    return device_mesh((2, 2), names)


def by_blocks(mesh: DeviceMesh, net: Any) -> Any:
    """As users do it: each block by itself, then the rest."""
    for block in (net.middle, net.deep):
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def without_root(mesh: DeviceMesh, net: Any) -> Any:
    """Each block is a root of its own, and ends its backward passes by itself."""
    for block in net.children():
        fully_shard(block, mesh=mesh)
    return net


def at_once(mesh: DeviceMesh, net: Any) -> Any:
    """All gradients come when the backward pass is over, as no input requires one."""
    return fully_shard(net, mesh=mesh)


def compiled(mesh: DeviceMesh, net: Any) -> Any:
    return torch.compile(at_once(mesh, net), backend="eager")


WAYS: dict[str, Callable[[DeviceMesh, nn.Module], Any]] = {
    way.__name__: way for way in (by_blocks, without_root, at_once, compiled)
}


def attached(
    way: Callable[[DeviceMesh, nn.Module], Any], exchange: Any, **settings: Any
) -> tuple[Any, Handle]:
    mesh = grid()
    net = way(mesh["shard"], Net())
    return net, gw.attach(
        net,
        exchange,
        group=mesh["replicate"],
        **keywords(bucket_cap_mb=SMALL_MB, **settings),
    )


def accumulate(net: Any, rank: int, local: Callable[[bool], None]) -> str:
    """Three backward passes, of which only the last is synchronised; the bits after a
    step.
    """
    optimizer = momentum(net.parameters())
    for step in range(3):
        local(step < 2)
        loss_of(net, rank, step).backward()
    optimizer.step()
    return digest(held(net))


def native_and_none(
    rank: int, world: int, ways: Sequence[str]
) -> tuple[list[str], dict[str, tuple[list[str], int]]]:
    """The bits of HSDP after training and accumulation, and ours of each way with the
    steps.
    """

    def trained(net: Any) -> list[str]:
        train(net, momentum(net.parameters()), rank, range(3))
        found = [digest(held(net))]
        net.zero_grad()
        sharded = [m for m in net.modules() if hasattr(m, "set_requires_gradient_sync")]

        def whole(is_local: bool) -> None:
            for module in sharded:
                module.set_requires_gradient_sync(not is_local)

        return [*found, accumulate(net, rank, whole)]

    ours = {}
    for name in ways:
        net, handle = attached(WAYS[name], DENSE)
        ours[name] = trained(net), handle.step
        handle.detach()
    return trained(by_blocks(grid(), Net())), ours


@sampled("ways", [*WAYS])
def test_none_has_the_bits_of_hsdp(ways: list[str], four: Ranks) -> None:
    results = four.run(native_and_none, ways)
    for native, ours in results:
        for way, (own, steps) in ours.items():
            assert own == native, way
            assert steps == 4, "a pass without synchronisation was exchanged"
    assert results[0][0] == results[2][0] != results[1][0] == results[3][0]


def shards_accumulate(rank: int, world: int) -> tuple[str, str]:
    mesh = grid()
    native = by_blocks(mesh, Net())
    ours, handle = attached(by_blocks, DENSE)

    def paused(is_local: bool) -> None:
        handle._hooks.is_paused = is_local  # type: ignore[union-attr]

    wanted = accumulate(
        native, rank, lambda local: native.set_requires_all_reduce(not local)
    )
    return wanted, accumulate(ours, rank, paused)


def test_shards_accumulate_without_an_exchange(four: Ranks) -> None:
    for wanted, found in four.run(shards_accumulate):
        assert found == wanted


def conserved(rank: int, world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gradient, mean and residual of each parameter in one step, summed up over
    replicas.
    """
    mesh, own, net = (
        grid(),
        {},
        nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 1)),
    )
    fully_shard(net, mesh=mesh["shard"])
    for name, param in net.named_parameters():

        def note(param: Any, name: str = name) -> None:
            own[name] = param.grad.to_local().clone()

        param.register_post_accumulate_grad_hook(note)
    handle = gw.attach(net, TOPK, group=mesh["replicate"])
    torch.manual_seed(rank)
    net(torch.randn(8, 13)).square().mean().backward()
    found, residuals = [], handle.residuals()
    for name, param in net.named_parameters():
        mean = param.grad.to_local() if param.grad is not None else None
        left = residuals.get(name, torch.zeros(own[name].numel())).view_as(own[name])
        for tensor in (own[name], left):
            dist.all_reduce(tensor, group=mesh["replicate"].get_group())
        found.append((own[name], mean, left))
    return found


def test_nothing_of_a_shard_is_lost(four: Ranks) -> None:
    results = four.run(conserved)
    for found in results:
        for total, mean, left in found:
            torch.testing.assert_close(2 * mean + left, total)
        assert any(left.any() for _, _, left in found)
    assert [mean.numel() for _, mean, _ in results[0]] == [19 * 13, 19, 37, 1]
    assert [mean.numel() for _, mean, _ in results[1]] == [18 * 13, 18, 0, 0], (
        "no empty shards"
    )


def resumed(rank: int, world: int) -> tuple[str, str, str, list[str]]:
    net, handle = attached(by_blocks, ONEBIT)
    optimizer = momentum(net.parameters())
    train(net, optimizer, rank, range(3))
    saved = handle.state_dict()
    values = [shard.clone() for shard in held(net)]
    moments = [
        optimizer.state[p]["momentum_buffer"].to_local().clone()
        for p in net.parameters()
    ]
    train(net, optimizer, rank, range(3, 6))
    whole = digest(held(net))
    handle.detach()

    again, other = attached(by_blocks, ONEBIT)
    resumed_by = momentum(again.parameters())
    train(again, resumed_by, rank, range(1))
    with torch.no_grad():
        for shard, value in zip(held(again), values, strict=True):
            shard.copy_(value)
        for p, moment in zip(again.parameters(), moments, strict=True):
            resumed_by.state[p]["momentum_buffer"].to_local().copy_(moment)
    reported = []
    wrong = {**saved, "shard": f"part {1 - rank % 2} of 2"}
    with pytest.raises(InvalidSetting) as raised:
        other.load_state_dict(wrong)
    reported.append(str(raised.value))
    with pytest.raises(InvalidSetting) as raised:
        gw.redistribute([saved, {**wrong, "rank": 1 - saved["rank"]}], 1)
    reported.append(str(raised.value))
    other.load_state_dict(saved)
    train(again, resumed_by, rank, range(3, 6))
    return saved["shard"], whole, digest(held(again)), reported


def test_a_checkpoint_says_its_shard_and_goes_on_with_the_same_bits(
    four: Ranks,
) -> None:
    results = four.run(resumed)
    assert [shard for shard, *_ in results] == ["part 0 of 2", "part 1 of 2"] * 2
    for rank, (_, whole, again, (other, mixed)) in enumerate(results):
        assert again == whole
        assert (
            f"of part {1 - rank % 2} of 2 of every layer and this rank holds" in other
        )
        assert "those of ranks that hold the same part of every layer" in mixed


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.seldom = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + self.seldom(x) if both else self.always(x)  # type: ignore[no-any-return]


def branches(rank: int, world: int) -> tuple[list[Tensor], list[str], int]:
    """One replica uses a layer, the other does not; before, a forward pass left all
    gathered.
    """
    mesh, net = grid(), Branches()
    for layer in (net.always, net.seldom):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    x = torch.ones(2, 6)
    with torch.no_grad():
        net(x, True)
    handle = gw.attach(net, DENSE, group=mesh["replicate"])
    net(x, rank < 2).sum().backward()
    grads = [p.grad for p in net.parameters()]
    found = [grad.to_local() for grad in grads if isinstance(grad, DTensor)]
    placements = [str(grad.placements) for grad in grads if isinstance(grad, DTensor)]
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return found, placements, handle.step


def test_a_layer_that_one_replica_uses_gets_half_of_its_gradient(four: Ranks) -> None:
    for found, placements, steps in four.run(branches):
        assert len(found) == 4
        assert len(set(placements)) == steps == 1
        for always, seldom in zip(found[:2], found[2:], strict=True):
            assert torch.equal(seldom, always / 2)


class Parallel(nn.Module):
    """Layers cut by columns and rows, a norm over parts of the sequence, and a whole
    layer.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 10)
        self.down, self.last = nn.Linear(10, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(torch.tanh(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def tensor_parallel(rank: int, world: int) -> list[tuple[str, str, str]]:
    """The bits of torch's means and ours, and the shard, of layers that FSDP shards too
    or not.
    """
    mesh, found = device_mesh((2, 1, 2), ("dp", "shard", "tp")), []
    up = ColwiseParallel(input_layouts=Shard(1))  # as the norm leaves it
    for is_sharded in (False, True):
        bits, shard = [], ""
        for own in (False, True):
            cut = {"norm": SequenceParallel(), "up": up, "down": RowwiseParallel()}
            net = parallelize_module(Parallel(), mesh["tp"], cut)
            if is_sharded:
                net = without_root(mesh["shard"], net)
            if own:
                handle = gw.attach(net, DENSE, group=mesh["dp"], options=SMALL)
                shard = handle.state_dict()["shard"]
            optimizer = momentum(net.parameters())
            torch.manual_seed(rank // 2)  # ranks of one group see the same data
            for _ in range(2):
                optimizer.zero_grad()
                net(torch.randn(4, 2, 6)).square().mean().backward()
                if not own:
                    average(net, mesh["dp"])
                optimizer.step()
            bits.append(digest(held(net)))
        found.append((bits[0], bits[1], shard))
    return found


def average(net: nn.Module, mesh: DeviceMesh) -> None:
    """Averages gradients as one does by hand."""
    for param in net.parameters():
        grad: Any = param.grad
        if isinstance(grad, DTensor) and isinstance(param, DTensor):
            grad = param.grad = grad.redistribute(placements=param.placements)
            grad = grad.to_local()
        dist.all_reduce(grad.div_(2), group=mesh.get_group())


def test_tensor_parallel_layers_train_as_without_gradwire(four: Ranks) -> None:
    for results in zip(*four.run(tensor_parallel), strict=True):
        assert [shard for *_, shard in results] == ["part 0 of 2", "part 1 of 2"] * 2
        for native, own, _ in results:
            assert own == native
        assert results[0][1] == results[2][1] != results[1][1]


def replaced(rank: int, world: int) -> str:
    net, handle = attached(by_blocks, DENSE)
    train(net, momentum(net.parameters()), rank, range(2))
    net.load_state_dict(
        {n: v.clone() for n, v in net.state_dict().items()}, assign=True
    )
    with pytest.raises(RankFailed) as raised:
        train(net, momentum(net.parameters()), rank, range(1))
    handle.detach()
    return str(raised.value)


def test_sharded_parameters_that_are_replaced(four: Ranks) -> None:
    for outcome in four.run(replaced):
        assert re.search(
            r"\(a DTensor; \d+ in all\) came into the model after it was", outcome
        )


def wrong(rank: int, world: int) -> list[str]:
    mesh, reported = grid(), []

    def refused(model: nn.Module, **settings: Any) -> None:
        with pytest.raises(InvalidSetting) as raised:
            gw.attach(model, DENSE, **keywords(**settings))
        reported.append(str(raised.value))

    replicate = mesh["replicate"]
    native = by_blocks(mesh, Net())
    refused(native, group=replicate)
    refused(native)
    sharded = by_blocks(mesh["shard"], Net())
    refused(sharded)
    refused(sharded, group=mesh["shard"])
    refused(sharded, mesh="torchrun")
    partly = Net()
    fully_shard(partly.deep, mesh=mesh["shard"])
    refused(partly, group=replicate)
    refused(fully_shard(Net(), mesh=device_mesh((world,))))
    return reported


def with_and_without_shards(rank: int, world: int) -> tuple[str, str, str]:
    """Shards that agree on a threshold; then ranks of different shards, which do not
    average.
    """
    mesh, exchange = grid(), sharded_dgc(density=0.1, sample_share=0.5)
    net = by_blocks(mesh["shard"], Net())
    handle = gw.attach(
        net, exchange, group=mesh["replicate"], **keywords(shards=mesh["shard"])
    )
    train(net, momentum(net.parameters()), rank, range(2))
    found, bits = handle.state_dict()["shard"], digest(held(net))
    handle.detach()
    net.zero_grad()
    crosswise = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    with pytest.raises(RanksDiffer) as raised:
        gw.attach(net, DENSE, group=crosswise[rank in (1, 2)])
    return found, bits, str(raised.value)


def test_ranks_of_the_same_shards_train_alike_and_others_are_refused(
    four: Ranks,
) -> None:
    results = four.run(with_and_without_shards)
    assert [shard for shard, *_ in results] == ["part 0 of 2", "part 1 of 2"] * 2
    assert results[0][1] == results[2][1] != results[1][1] == results[3][1]
    for *_, reported in results:
        assert re.search(r"shards is 'part . of 2' against 'part . of 2'", reported)


def test_wrong_meshes_and_groups_are_refused_with_the_remedy(four: Ranks) -> None:
    for reported in four.run(wrong):
        for text in reported[:2]:
            assert "the dimensions ('replicate', 'shard') averages the gradient" in text
            assert "fully_shard(module, mesh=mesh['shard'])" in text
            assert "group=mesh['replicate']" in text
        assert "group must be ranks that hold the same shard" in reported[2]
        assert "which hold different shards of first.weight" in reported[3]
        assert "mesh must be None beside parameters that are DTensors" in reported[4]
        assert (
            "first.weight is trained and outside of what fully_shard() holds"
            in reported[5]
        )
        assert (
            "; on one mesh without replicas call gw.fsdp.reduce_scatter(model"
            in reported[6]
        )
        assert "group=mesh['replicate']" in reported[3]
        assert "gw.fsdp.reduce_scatter" in reported[3]
