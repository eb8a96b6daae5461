"""Ranks whose data end before those of others, and ranks without a batch, answer with
zeros.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import SGD

import gradwire as gw
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, TOPK, batch, ddp, digest

pytestmark = pytest.mark.multi


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(13, 5)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def delivered(rank: int, world: int) -> list[Tensor]:
    """Own gradients, means and residuals, each summed over the steps."""
    model = linear()
    handle = gw.attach(model, TOPK, options=gw.Options(compress_if=lambda *_: True))
    own, means = (torch.zeros_like(model.weight) for _ in range(2))

    def note(grad: Tensor) -> None:
        own.add_(grad.detach())

    model.weight.register_hook(note)
    before = own
    for step in range(6):
        model.zero_grad()
        if rank == 0 and step >= 2:
            handle.backward_without_batch()
        else:
            loss_of(model, rank, step).backward()
        assert model.weight.grad is not None
        means += model.weight.grad
        if step == 1:
            before = handle.residuals()["weight"].view_as(means)
    after = handle.residuals()["weight"].view_as(means)
    handle.detach()
    return [own, means, before, after]


def test_what_a_rank_without_batches_owes_still_arrives(two: Ranks) -> None:
    (own, means, at_end_of_data, kept), (own_1, means_1, _, kept_1) = two.run(delivered)
    assert torch.equal(means, means_1)
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
        (
            torch.stack([loss_of(model, rank, step) for rank in ranks]).sum() / 2
        ).backward()
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
    handle = gw.attach(
        wrapped, "topk", options=SMALL, failure=gw.FailurePolicy(check_every=1)
    )
    note(lambda: Join([handle]))
    note(handle.backward_without_batch)
    note(lambda: wrapped.join(divide_by_initial_world_size=False))
    with wrapped.join():  # DDP's own, as gradwire left it
        for step in range(rank + 1):
            loss_of(wrapped, rank, step).backward()
    handle.detach()
    assert "join_hook" not in vars(wrapped)
    model = linear()
    local = gw.local_steps(model, SGD(model.parameters(), lr=0.1), "topk", every=2)
    note(local.backward_without_batch)
    local.detach()
    chosen = gw.attach(model, "auto")
    note(chosen.backward_without_batch)
    chosen.detach()
    return found


def test_what_cannot_do_without_a_batch_is_refused_by_name(two: Ranks) -> None:
    found, _ = two.run(refused)
    expected = [
        "with model.join():",
        "a DDP model",
        "initial_world_size",
        "local_steps",
        "'auto'",
    ]
    for text, part in zip(found, expected, strict=True):
        assert part in text
