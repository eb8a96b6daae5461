"""A handle as a context manager: it detaches at the end, and hides no error of the
loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradwire as gw
from tests.each import each
from tests.runtime.ranks import Ranks

Begin = Callable[[nn.Module, torch.optim.Optimizer], gw.Handle]


def each_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> gw.Handle:
    return gw.attach(model, "topk")


def in_periods(model: nn.Module, optimizer: torch.optim.Optimizer) -> gw.Handle:
    return gw.local_steps(model, optimizer, "none", every=2, delay=1)


def made(begin: Begin) -> tuple[nn.Module, torch.optim.Optimizer, gw.Handle]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, begin(model, optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()


@each("begin", [each_step, in_periods])
def test_a_handle_detaches_at_the_end_of_its_block(begin: Begin) -> None:
    model, optimizer, handle = made(begin)
    with handle as entered:
        train(model, optimizer, 3)
    assert entered is handle
    assert not handle.attached
    handle.detach()  # once more is no mistake
    optimizer.zero_grad()
    gw.attach(model, "none").detach()


@each("begin", [each_step, in_periods])
def test_a_block_that_raises_is_left_detached_with_its_own_error(begin: Begin) -> None:
    model, optimizer, handle = made(begin)

    def fail() -> None:
        with handle:
            train(model, optimizer, 3)
            raise KeyError("the loop's own")

    with pytest.raises(KeyError, match="the loop's own"):
        fail()
    assert not handle.attached


def test_an_error_of_detach_is_a_note_of_the_first_error_or_is_raised() -> None:
    _, _, handle = made(each_step)
    handle.detach()
    handle.detach = lambda: int("")  # type: ignore[method-assign, assignment, return-value]

    def leave(error: Exception | None) -> None:
        with handle:
            if error is not None:
                raise error

    with pytest.raises(KeyError) as raised:
        leave(KeyError("the loop's own"))
    (note,) = raised.value.__notes__
    assert note.startswith("detach() failed too: ValueError: invalid literal")
    with pytest.raises(ValueError, match="invalid literal"):
        leave(None)


def losing(rank: int, world: int, begin: Begin) -> tuple[bool, tuple[int, ...]]:
    model, optimizer, handle = made(begin)
    try:
        with handle:
            train(model, optimizer, 2)
            if rank == 1:
                os._exit(9)
            train(model, optimizer, 3)
    except gw.RankFailed as error:
        return handle.attached, error.ranks
    raise AssertionError("nobody noticed")


@pytest.mark.multi
@pytest.mark.parametrize("begin", [each_step, in_periods])
def test_the_loss_of_a_rank_is_the_error_that_leaves_the_block(
    doomed_two: Ranks, begin: Begin
) -> None:
    doomed_two.send(losing, begin)
    assert doomed_two.survivors({1}) == [(False, (1,))]


def leaving(rank: int, world: int) -> str:
    """Rank 1 raises between two steps; its block detaches, and it lives on."""
    model, optimizer, handle = made(each_step)
    try:
        with handle:
            train(model, optimizer, 2)
            if rank == 1:
                raise KeyError("the loop's own")
            train(model, optimizer, 3)
    except (KeyError, gw.RankFailed) as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.multi
def test_a_block_that_a_rank_leaves_early_ends_the_others(doomed_two: Ranks) -> None:
    assert doomed_two.run(leaving) == ["RankFailed", "KeyError"]
