"""Models and moments that lossy exchanges must survive: replicas stay equal, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import RankFailed
from tests.each import each
from tests.runtime.given import SMALL, keywords
from tests.runtime.models import (
    Frozen,
    Mixed,
    OneElement,
    OneParameter,
    Recomputed,
    Tied,
    Words,
    sparse_rows,
)
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    CHOSEN,
    DENSE,
    ONEBIT,
    SMALL_MB,
    TOPK,
    Net,
    adamw,
    ddp,
    digest,
    everything,
    loss_of,
    momentum,
    named,
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


MODELS = (Frozen, Tied, Mixed, OneParameter, OneElement, Recomputed, Empty, Strided)


def lossy(rank: int, world: int, make: Callable[[], nn.Module]) -> list[str]:
    found = []
    for exchange in (ONEBIT, TOPK):
        kept = []
        for wrapped in (False, True):
            net = make()
            model = ddp(net) if wrapped else net
            handle = gw.attach(
                model, exchange, **keywords(bucket_cap_mb=SMALL_MB, compress_if=everything)
            )
            train(model, adamw(model.parameters()), rank, range(4))
            kept.append(handle.residuals())
            handle.detach()
            found.append(digest(net))
        for name, alone in kept[0].items():
            torch.testing.assert_close(kept[1][name], alone)
    return found


@each("make", MODELS)
def test_replicas_of_awkward_models(make: Callable[[], nn.Module], two: Ranks) -> None:
    one, other = two.run(lossy, make)
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


def test_parameters_and_buffers_are_rank_0s_at_attach_and_buffers_never_again(two: Ranks) -> None:
    (first, mean, strided), (other_first, other_mean, other_strided) = two.run(start)
    assert first == other_first
    assert strided == other_strided == 0.0
    assert mean != other_mean


def sparse_and_lossy(rank: int, world: int) -> str:
    """Tables travel without loss whatever the exchange of the rest is."""
    ours = Words()
    ours.last.requires_grad_(False)
    plain = Words()
    plain.last.requires_grad_(False)
    gw.attach(ours, TOPK)
    found = sparse_rows(rank, ours, None)
    expected = sparse_rows(rank, ddp(plain), None)
    for mine, their in zip(found, expected, strict=True):
        if mine is not None and their is not None:
            torch.testing.assert_close(mine.to_dense(), their.to_dense())
    return digest(ours)


def test_sparse_tables_beside_a_lossy_exchange(two: Ranks) -> None:
    assert len(set(two.run(sparse_and_lossy))) == 1


def ignored(rank: int, world: int) -> tuple[str, str]:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["deep.weight"])
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


def test_subgroups(four: Ranks) -> None:
    (a, _), (b, one), (c, _), (d, other) = four.run(in_pairs)
    assert a == b != c == d
    assert one is not None
    assert one == other


def overflow(rank: int, world: int, exchange: Exchange) -> str:
    net = Net()
    handle = gw.attach(net, exchange, options=SMALL)
    optimizer = momentum(net.parameters())
    train(net, optimizer, rank, range(2))
    for step, bad in enumerate((float("inf"), float("nan")), start=2):

        def spoil(grad: Tensor, bad: float = bad) -> Tensor:
            return grad.index_fill(0, torch.tensor([1]), bad)

        spoilt = net.deep.weight.register_hook(spoil) if rank == 1 else None
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        if spoilt is not None:
            spoilt.remove()
        assert not torch.isfinite(net.deep.weight.grad).all()  # type: ignore[arg-type]
        assert all(bool(torch.isfinite(r).all()) for r in handle.residuals().values())
    train(net, optimizer, rank, range(4, 6))
    assert all(bool(torch.isfinite(p).all()) for p in net.parameters())
    return digest(net)


@each("exchange", CHOSEN, ids=named)
def test_what_is_not_finite_reaches_all_ranks_and_no_residual(
    exchange: Exchange, two: Ranks
) -> None:
    one, other = two.run(overflow, exchange)
    assert one == other


def scaled(rank: int, world: int, exchange: Exchange, wrapped: bool) -> tuple[list[float], str]:
    net = Net()
    model = ddp(net, broadcast_buffers=False) if wrapped else net
    handle = gw.attach(model, exchange, options=SMALL)
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = digest(net)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert (digest(net) == before) == (step == 2)
        scales.append(scaler.get_scale())
        assert all(bool(torch.isfinite(r).all()) for r in handle.residuals().values())
    return scales, digest(net)


@each("exchange, wrapped", zip(CHOSEN, (False, True, False), strict=True))
def test_grad_scaler_skips_the_same_step_on_all_ranks(
    exchange: Exchange, wrapped: bool, two: Ranks
) -> None:
    one, other = two.run(scaled, exchange, wrapped)
    assert one == other
    assert one[0] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]


def interrupted(net: Net, rank: int) -> None:
    """A backward pass that raises when some gradients have been handed in and some have not."""

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


def test_a_rank_that_goes_on_after_a_broken_backward_stops_all(doomed: Ranks) -> None:
    """Its peers hold half of a step that it would begin again: nobody may train on that."""
    for ranks, step, text in doomed.run(going_on):
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
