"""Models and moments that lossy exchanges must survive: replicas stay equal, nothing is
lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.errors import RankFailed
from tests.runtime.given import SMALL, keywords
from tests.runtime.models import (
    Frozen,
    Mixed,
    OneElement,
    Tied,
)
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    DENSE,
    ONEBIT,
    SMALL_MB,
    TOPK,
    Net,
    adamw,
    ddp,
    digest,
    everything,
    momentum,
    train,
)

pytestmark = pytest.mark.multi


class Empty(Net):
    """A parameter without elements beside others, and one in a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.alone = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum() + self.alone.sum().float()


class Strided(nn.Module):
    """Parameters whose elements do not lie in their order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 13).t())
        self.filters = nn.Parameter(
            torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.filters.sum()


MODELS = (Frozen, Tied, Mixed, OneElement, Empty, Strided)


def lossy(rank: int, world: int) -> list[str]:
    return [bits for make in MODELS for bits in both_ways(rank, make)]


def both_ways(rank: int, make: Callable[[], nn.Module]) -> list[str]:
    """Bits of the model trained as a module and under DDP; what both still owe is the
    same.
    """
    found, kept = [], []
    for wrapped in (False, True):
        net = make()
        model = ddp(net) if wrapped else net
        given = keywords(bucket_cap_mb=SMALL_MB, compress_if=everything)
        handle = gw.attach(model, ONEBIT, **given)
        train(model, adamw(model.parameters()), rank, range(3))
        kept.append(handle.residuals())
        handle.detach()
        found.append(digest(net))
    for name, alone in kept[0].items():
        torch.testing.assert_close(kept[1][name], alone)
    return found


def test_replicas_of_awkward_models_stay_equal(two: Ranks) -> None:
    one, other = two.run(lossy)
    assert one == other


def test_a_sparse_gradient_made_dense_lies_as_its_parameter_does() -> None:
    """torch's fused optimizers take elements in the order of memory."""
    net = Strided()
    handle = gw.attach(net, DENSE)
    rows = nn.functional.embedding(torch.tensor([2, 7]), net.weight, sparse=True)
    (rows.sum() + net.filters.sum()).backward()
    assert net.weight.grad is not None
    assert net.weight.grad.stride() == net.weight.stride()
    assert net.weight.grad.sum(1).nonzero().flatten().tolist() == [2, 7]
    handle.detach()


def start(rank: int, world: int) -> tuple[str, str, float]:
    net = Net(seed=rank)
    net.deep.requires_grad_(False)
    net.register_buffer("count", torch.tensor(rank))
    net.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
    net.register_buffer("empty", torch.empty(0))
    net.register_buffer("strided", torch.full((2, 3), float(rank)).t())
    net.norm.running_mean.fill_(rank)  # type: ignore[union-attr]
    handle = gw.attach(net, TOPK)
    first = digest([*net.parameters(), *net.buffers()])
    # Only once: what a batch norm sees afterwards is this rank's own.
    train(net, momentum(net.parameters()), rank, range(2))
    handle.detach()
    return first, digest([net.norm.running_mean]), float(net.strided.sum())  # type: ignore[list-item]


def test_parameters_and_buffers_are_rank_0s_at_attach_and_buffers_never_again(
    two: Ranks,
) -> None:
    (first, mean, strided), (other_first, other_mean, other_strided) = two.run(start)
    assert first == other_first
    assert strided == other_strided == 0.0
    assert mean != other_mean


def ignored(rank: int, world: int) -> tuple[str, str]:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, ["deep.weight"]
    )
    model = ddp(net)
    gw.attach(model, TOPK, options=SMALL)
    train(model, momentum(model.parameters()), rank, range(2))
    others = [p for name, p in net.named_parameters() if name != "deep.weight"]
    return digest(others), digest([net.deep.weight])


def test_what_ddp_ignores_stays_local(two: Ranks) -> None:
    (others, own), (other_others, other_own) = two.run(ignored)
    assert others == other_others
    assert own != other_own


def in_pairs(rank: int, world: int) -> tuple[str, str | None]:
    """Two halves train models of their own; then ranks 1 and 3 a third one."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    odd = dist.new_group([1, 3])
    half = rank // 2
    net = Net(seed=10 * rank)
    handle = gw.attach(net, TOPK if half else ONEBIT, group=halves[half], options=SMALL)
    assert (handle.rank, handle.world_size) == (rank % 2, 2)
    train(net, momentum(net.parameters()), rank, range(3 + 2 * half))
    third = None
    if rank in (1, 3):
        both = Net(seed=rank)
        gw.attach(both, DENSE, group=odd)
        train(both, momentum(both.parameters()), rank, range(3))
        third = digest(both)
    if half == 0:  # From here on rank 1 has made more groups than rank 3.
        again = Net(seed=rank)
        gw.attach(again, DENSE, group=halves[0])
        train(again, momentum(again.parameters()), rank, range(1))
    if rank in (1, 3):
        last = Net(seed=rank)
        gw.attach(last, DENSE, group=odd)
        train(last, momentum(last.parameters()), rank, range(1))
    return digest(net), third


def test_subgroups_train_apart_from_each_other(four: Ranks) -> None:
    (a, _), (b, one), (c, _), (d, other) = four.run(in_pairs)
    assert a == b != c == d
    assert one is not None
    assert one == other


def interrupted(net: Net, rank: int) -> None:
    """A backward pass that raises when some gradients have been handed in and some have
    not.
    """

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError("the user's own mistake")

    hook = net.middle.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        train(net, momentum(net.parameters()), rank, [2])
    hook.remove()


def going_on(rank: int, world: int) -> tuple[tuple[int, ...], int, str]:
    net = Net()
    gw.attach(net, ONEBIT, options=SMALL)
    optimizer = momentum(net.parameters())
    train(net, optimizer, rank, range(2))
    if rank == 1:
        interrupted(net, rank)
    with pytest.raises(RankFailed) as raised:
        train(net, optimizer, rank, range(2, 4))
    return raised.value.ranks, raised.value.step, str(raised.value)


def test_a_rank_that_goes_on_after_a_broken_backward_stops_all(
    doomed_two: Ranks,
) -> None:
    """Its peers hold half of a step that it would begin again: nobody may train on
    that.
    """
    for ranks, step, text in doomed_two.run(going_on):
        assert (ranks, step) == ((1,), 2)
        assert "after an earlier backward pass that raised before its end" in text


def test_alone_a_broken_backward_can_be_repeated() -> None:
    def run(attached: bool) -> str:
        net = Net()
        handle: Any = gw.attach(net, TOPK, options=SMALL) if attached else None
        optimizer = momentum(net.parameters())
        train(net, optimizer, 0, range(2))
        interrupted(net, 0)
        train(net, optimizer, 0, range(2, 5))
        if attached:
            handle.detach()
        return digest(net)

    assert run(attached=True) == run(attached=False)
