"""Residuals that only grow are told of: what is kept there never gets through."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Exchange, Result, State
from gradwire.contract.verbs import AllReduce, Steps
from gradwire.exchange.local import drive
from gradwire.runtime.step.figures import outgrown
from gradwire.runtime.step.messages import Message, ParamRange
from tests.runtime.ranks import Ranks
from tests.runtime.training import Net, train

WORLD = 2


@dataclass(frozen=True)
class keeps_all(Exchange):
    """Delivers nothing of the second half of a message, and all of the first."""

    def init(self, spec: gw.TensorSpec, world: int) -> State:
        return None

    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Result]:
        sent_N = grad_N.clone()
        sent_N[len(sent_N) // 2 :] = 0
        mean_N = sent_N / world
        yield AllReduce(mean_N)
        return mean_N, sent_N, state


def messages() -> list[Message]:
    """One rank's each: two tensors of 8 elements."""
    parts = [ParamRange.whole(name, torch.zeros(8)) for name in ("first", "second")]
    exchange = gw.with_error_feedback(keeps_all())
    return [Message(0, parts, exchange, rank, WORLD) for rank in range(WORLD)]


def stepped(own: list[Message], num_steps: int) -> None:
    for step in range(num_steps):
        draw = torch.Generator().manual_seed(step)
        grads = [{n: 1 + torch.rand(8, generator=draw) for n in m.names} for m in own]
        for message in own:
            message.notes_norms = step == num_steps - 1
        drive([message.text(g) for message, g in zip(own, grads, strict=True)], seed=step)


def test_what_grows_for_ever_is_found_and_what_arrives_is_not() -> None:
    own = messages()
    stepped(own, 64)
    assert outgrown(own) == []  # 64 gradients: a sparsifier of 1 % owes as many
    stepped(own, 64)
    [(name, factor)] = outgrown(own[:1])
    assert name == "second"
    assert 100 < factor < 150


def test_what_sends_few_elements_may_owe_more() -> None:
    own = messages()
    stepped(own, 128)
    for message in own:
        message.member.selection = gw.contract.Selection(0.01 * 16, 1, 1)
    assert outgrown(own) == []


def test_a_gradient_of_zeros_or_of_nan_says_nothing() -> None:
    own = messages()
    stepped(own, 128)
    for norm in (0.0, float("nan")):
        own[0].norms = [norm, norm]
        assert outgrown(own[:1]) == []


def warnings_of(rank: int, world: int, exchange: Exchange, num_steps: int) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    net = Net()
    handle = gw.attach(net, exchange)
    train(net, torch.optim.SGD(net.parameters(), lr=0.0), rank, num_steps * [0])
    logging.getLogger("gradwire").removeHandler(handler)
    handle.detach()
    return heard


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_is_warned_once_and_a_sound_one_never(two: Ranks) -> None:
    for found in two.run(warnings_of, gw.with_error_feedback(keeps_all()), 256):
        [warning] = found
        assert "times the norm of its gradient" in warning
        assert "after 128 steps" in warning
    assert two.run(warnings_of, gw.exchange_for(gw.compress.onebit()), 128) == [[]] * 2
