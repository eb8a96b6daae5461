"""Ranks whose data end before those of others, and ranks without a batch, answer with zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import SGD

import gradwire as gw
from tests.each import each
from tests.runtime.given import SMALL, keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, TOPK, Net, batch, ddp, digest, momentum

pytestmark = pytest.mark.multi


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(13, 5)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def joined(rank: int, world: int, exchange: Any, divides: bool) -> list[Tensor]:
    """Rank r has r + 2 batches; returns the parameters in the end."""
    model = linear()
    handle = gw.attach(model, exchange, **keywords(check_every=1))  # of the ranks that train
    optimizer = momentum(model.parameters())
    for _ in range(2):  # two epochs: the second begins alike on all ranks
        with Join([handle], divide_by_initial_world_size=divides, optimizer=optimizer):
            for step in range(rank + 2):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
    handle.detach()
    return [p.detach().clone() for p in model.parameters()]


def by_hand(world: int, divides: bool) -> list[Tensor]:
    """The same training in one process: zeros where a rank has no batch."""
    model = linear()
    optimizer = momentum(model.parameters())
    for _ in range(2):
        for step in range(world + 1):
            active = [rank for rank in range(world) if step < rank + 2]
            optimizer.zero_grad()
            total = sum(loss_of(model, rank, step) for rank in active)
            assert isinstance(total, Tensor)
            (total / (world if divides else len(active))).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@each("divides", [True, False])
def test_means_divide_as_asked(four: Ranks, divides: bool) -> None:
    found = four.run(joined, DENSE, divides)
    assert len({digest(params) for params in found}) == 1
    for one, other in zip(found[0], by_hand(4, divides), strict=True):
        torch.testing.assert_close(one, other)


def delivered(rank: int, world: int) -> list[Tensor]:
    """Own gradients, means that a rank saw and residuals, each summed over the steps."""
    model = linear()
    handle = gw.attach(model, TOPK, options=gw.Options(compress_if=lambda *_: True))
    own, means = (torch.zeros_like(model.weight) for _ in range(2))

    def note(grad: Tensor) -> None:
        own.add_(grad.detach())

    model.weight.register_hook(note)
    with Join([handle]):
        for step in range(2 if rank == 0 else 6):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            assert model.weight.grad is not None
            means += model.weight.grad
        kept = handle.residuals()["weight"].view_as(means)
        before = kept.clone()
    after = handle.residuals()["weight"].view_as(means)
    handle.detach()
    return [own, means, before, after]


def test_what_a_rank_that_ran_out_owes_still_arrives(two: Ranks) -> None:
    (own, _, at_end_of_data, kept), (own_1, means, _, kept_1) = two.run(delivered)
    torch.testing.assert_close(own + own_1, 2 * means + kept + kept_1)
    assert kept.norm() < at_end_of_data.norm()


def without_batch(rank: int, world: int) -> list[Tensor]:
    model = linear()
    handle = gw.attach(model, DENSE)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if (rank, step) == (1, 1):
            handle.backward_without_batch()
        else:
            loss_of(model, rank, step).backward()
        optimizer.step()
    assert handle.step == 3
    handle.detach()
    return [p.detach().clone() for p in model.parameters()]


def test_a_rank_without_a_batch_takes_part_in_the_step(two: Ranks) -> None:
    one, other = two.run(without_batch)
    assert digest(one) == digest(other)
    model = linear()
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ranks = [0] if step == 1 else [0, 1]
        (torch.stack([loss_of(model, rank, step) for rank in ranks]).sum() / 2).backward()
        optimizer.step()
    for mine, theirs in zip(one, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach())


def refused(rank: int, world: int) -> list[str]:
    found = []

    def note(act: Any) -> None:
        with pytest.raises(gw.InvalidSetting) as caught:
            act()
        found.append(str(caught.value))

    wrapped = ddp(linear())
    handle = gw.attach(wrapped, "topk", options=SMALL, failure=gw.FailurePolicy(check_every=1))
    note(lambda: Join([handle]))
    note(lambda: wrapped.join(divide_by_initial_world_size=False))
    with wrapped.join():  # DDP's own, as gradwire left it
        for step in range(rank + 1):
            loss_of(wrapped, rank, step).backward()
    handle.detach()
    assert "join_hook" not in vars(wrapped)
    model = linear()
    local = gw.local_steps(model, SGD(model.parameters(), lr=0.1), "topk", every=2)
    note(lambda: Join([local]))
    note(local.backward_without_batch)
    local.detach()
    chosen = gw.attach(model, "auto")
    note(lambda: Join([chosen]))
    chosen.detach()
    return found


def test_what_cannot_join_is_refused_by_name(two: Ranks) -> None:
    found, _ = two.run(refused)
    expected = ["handle of a DDP", "initial_world_size", "local_steps", "local_steps", "'auto'"]
    for text, part in zip(found, expected, strict=True):
        assert part in text


def test_a_process_that_is_alone_is_refused() -> None:
    handle = gw.attach(Net(), "topk")
    with pytest.raises(gw.InvalidSetting, match="a single process"):
        Join([handle])
    handle.detach()
