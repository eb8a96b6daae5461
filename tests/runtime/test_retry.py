"""A backward pass that raised cannot be repeated among ranks: all raise an error that says why."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.runtime.failure import blame
from tests.each import each
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, TOPK, Net, digest, loss_of, momentum

STEPS, BROKEN = 5, (1, 3)
"""The steps, and the ones in which memory runs out."""


def run_out(net: Net, layer: str, rank: int, step: int) -> None:
    """A backward pass that ends at a layer, as if memory had run out there."""

    def fail(grad: Tensor) -> None:
        raise torch.OutOfMemoryError("no memory")

    hook = net.get_submodule(layer).weight.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(net, rank, step + 100).backward()
    hook.remove()


def trained(exchange: Any, breaks: bool, accumulates: bool) -> tuple[str, str]:
    net = Net()
    handle = gw.attach(net, exchange, options=SMALL)
    optimizer = momentum(net.parameters())
    for step in range(STEPS):
        if breaks and step in BROKEN:
            run_out(net, "first", 0, step)
        optimizer.zero_grad()
        if accumulates:
            with handle.no_sync():
                loss_of(net, 0, step + 50).backward()
        loss_of(net, 0, step).backward()
        optimizer.step()
    owed = handle.residuals()
    handle.detach()
    return digest(net), digest([owed[name] for name in sorted(owed)])


@each("exchange, accumulates", [(DENSE, False), (TOPK, False), (TOPK, True)])
def test_a_rank_that_is_alone_forgets_the_pass(exchange: Any, accumulates: bool) -> None:
    broken, whole = (trained(exchange, breaks, accumulates) for breaks in (True, False))
    assert broken == whole


def repeated(rank: int, world: int, how: str) -> tuple[str, tuple[int, ...], str]:
    net, timeout = Net(), timedelta(seconds=30)
    shrinks = "shrink" if how == "shrink" else "end"
    policy = gw.FailurePolicy(timeout=timeout, on_failure=shrinks)
    handle = gw.attach(net, TOPK if how == "residuals" else DENSE, options=SMALL, failure=policy)
    begin_s = time.monotonic()
    if rank == 1 or how != "one rank":
        run_out(net, ("middle", "first")[rank], rank, 0)
        net.zero_grad()
    with pytest.raises(gw.RankFailed) as raised:
        loss_of(net, rank, 0).backward()
    assert time.monotonic() - begin_s < timeout.total_seconds() / 2
    with suppress(gw.RankFailed):
        handle.detach()
    assert sys.excepthook.__module__ == blame.__name__  # a script ends by the cause's code
    return type(raised.value).__name__, raised.value.ranks, str(raised.value)


@pytest.mark.multi
@pytest.mark.timeout(120)
@each("how", ["one rank", "all ranks", "residuals", "shrink"])
def test_several_ranks_say_why_they_cannot_repeat_it(doomed_two: Ranks, how: str) -> None:
    for kind, ranks, text in doomed_two.run(repeated, how):
        assert kind == "LoopMistake"
        assert len(ranks) == 1
        assert "came after an earlier backward pass that raised before its end" in text
        assert text.endswith("change the training loop: a restart alone ends in the same error")
