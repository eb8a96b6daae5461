"""Wrapped exchanges under ``attach``: momentum, clipping and warm-up, saved, resumed and shared."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.exchange.local import drive
from gradwire.runtime.step.messages import Message, ParamRange
from tests.each import each
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.test_checkpoint import SAVED_AT, resumed
from tests.runtime.test_own_draws_and_sizes import check
from tests.runtime.training import Net, digest, named, train

pytestmark = pytest.mark.multi

DGC = gw.deep_gradient_compression(
    warmup_steps=10, density=0.05, nesterov=True, clip_norm=1.0, sample_share=1.0
)
"""Of three stages: the second from step 5 to 9, so that a run is saved and resumed inside it."""
MEASURED = gw.with_measured_scheme(gw.compress.topk(density=0.1), num_steps=SAVED_AT + 2)
"""It is saved and resumed while it measures."""
ADAPTED = [
    gw.adapt(gw.compress.topk(density=0.1), every=5),
    gw.adapt(gw.compress.qsgd(block=64), error=0.2, every=5),
    gw.adapt(gw.compress.powersgd(rank=2), every=5),
]
"""Settings were chosen when it is saved, and are chosen anew after it is resumed."""
WRAPPED = [DGC, MEASURED, gw.with_momentum_correction(gw.compress.deft(density=0.1))]
"""Among two ranks a library's sum is the same in any order: so are the bits of the last."""


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05)


@each("exchange", WRAPPED, ids=named)
def test_attach_is_run_local(exchange: Exchange, two: Ranks) -> None:
    check(two, exchange)


@each(
    "exchange, wrapped",
    [(DGC, False), *((one, place % 2 == 0) for place, one in enumerate((DGC, MEASURED, *ADAPTED)))],
    ids=lambda one: ("module", "ddp")[one] if isinstance(one, bool) else named(one),
)
def test_a_run_resumed_inside_a_stage_is_the_uninterrupted_one(
    exchange: Exchange, wrapped: bool, two: Ranks
) -> None:
    """Modules and DDP by turns, and both for the first."""
    for whole, again, _ in two.run(resumed, exchange, wrapped):
        assert again == whole


def saved(rank: int, world: int) -> dict[str, Any]:
    net = Net()
    handle = gw.attach(net, DGC, options=SMALL)
    train(net, sgd(net), rank, range(SAVED_AT))
    return handle.state_dict()


def continued(rank: int, world: int, states: list[dict[str, Any]]) -> tuple[str, set[int]]:
    """Goes on with all parameters in one message; bits, and the steps that messages have done."""
    net = Net()
    handle = gw.attach(net, DGC, options=gw.Options(bucket_cap_mb=64))
    handle.load_state_dict(states[rank])
    done = {int(step) for message in handle._progress.messages for step in _steps(message)}
    train(net, sgd(net), rank, range(SAVED_AT, SAVED_AT + 3))
    return digest(net), done


def adapted(
    rank: int, world: int, exchange: Exchange, states: list[dict[str, Any]] | None
) -> tuple[dict[str, Any], dict[str, str], str]:
    """The state and the settings of each layer after seven more steps, and the bits."""
    net = Net()
    handle = gw.attach(net, exchange, options=SMALL)
    if states is not None:
        handle.load_state_dict(states[rank])
        loaded = handle.stats()["adapted"]
    train(net, sgd(net), rank, range(handle.step, handle.step + SAVED_AT))
    chosen = handle.stats()["adapted"]
    return handle.state_dict(), chosen if states is None else loaded, digest(net)


@each("old, new", [(4, 2), (2, 4)])
def test_other_ranks_go_on_with_the_settings_of_each_layer(
    old: int, new: int, pools: dict[int, Ranks]
) -> None:
    exchange = ADAPTED[0]
    states, chosen, bits = zip(*pools[old].run(adapted, exchange, None), strict=True)
    assert len(set(bits)) == 1
    assert len(set(chosen[0].values())) > 1, "all layers have the same settings"
    assert all(one == chosen[0] for one in chosen)
    _, loaded, again = zip(
        *pools[new].run(adapted, exchange, gw.redistribute(list(states), new)), strict=True
    )
    assert all(one == chosen[0] for one in loaded)
    assert len(set(again)) == 1


def _steps(message: Message) -> tuple[torch.Tensor, ...]:
    return getattr(message.state, "step_T", ())


@each("old, new", [(4, 2), (2, 4)])
def test_other_ranks_and_messages_go_on_with_the_same_mean_momentum(
    old: int, new: int, pools: dict[int, Ranks]
) -> None:
    states = pools[old].run(saved)
    shared = gw.redistribute(states, new)
    for name, fields in states[0]["params"].items():
        for path in fields:
            if path.endswith(("velocity_N", "residual_N")):
                before, after = (
                    torch.stack([s["params"][name][path] for s in ranks]).mean(0)
                    for ranks in (states, shared)
                )
                assert bool(before.any()) == (path != "residual_N"), "that of an uncompressed one"
                torch.testing.assert_close(after, before)
    found = pools[new].run(continued, shared)
    assert len({bits for bits, _ in found}) == 1
    assert all(done == {SAVED_AT} for _, done in found)


def test_a_parameter_that_no_rank_used_keeps_velocity_and_its_place_in_the_warm_up() -> None:
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    parts = [ParamRange.whole(name, p) for name, p in zip("ab", weights, strict=True)]
    message = Message(0, parts, DGC, 0, 1)
    drive([message.text({"a": torch.ones(4, 4), "b": torch.ones(4, 4)})])
    before = [message.own_state(slot) for slot in message.slots]
    drive([message.text({"a": torch.ones(4, 4), "b": None})])
    message.take_back("b")
    used, unused = (message.own_state(slot) for slot in message.slots)
    assert not torch.equal(used["inner.velocity_N"], before[0]["inner.velocity_N"])
    assert [int(fields["step_T"]) for fields in (used, unused)] == [2, 1]
    assert all(torch.equal(unused[path], tensor) for path, tensor in before[1].items())
    drive([message.text({"a": torch.ones(4, 4), "b": torch.ones(4, 4)})])
    assert [int(step) for step in _steps(message)] == [3, 3]


@pytest.mark.parametrize(
    ("exchange", "warns"), [(DGC, True), (gw.compress.dgc(), False)], ids=["dgc", "encoding alone"]
)
def test_rows_without_momentum_are_warned_of(
    exchange: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Embedding(10, 4, sparse=True)
    with caplog.at_level(logging.WARNING, logger="gradwire"):
        gw.attach(net, exchange).detach()
    said = "row-sparse gradients get no momentum from the exchange (weight, ...)"
    assert [record.message.startswith(said) for record in caplog.records] == [True] * warns


@pytest.mark.parametrize(
    ("optimizer", "exchange", "warns"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), DGC, True),
        (lambda params: torch.optim.AdamW(params), DGC, True),
        (lambda params: torch.optim.SGD(params, lr=0.1), DGC, False),
        (lambda params: torch.optim.AdamW(params), gw.compress.dgc(), False),
    ],
    ids=["sgd with momentum", "adamw", "sgd", "no correction"],
)
def test_momentum_that_counts_twice_is_warned_of(
    optimizer: Any, exchange: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING, logger="gradwire"):
        gw.attach(net, exchange, optimizer=optimizer(net.parameters())).detach()
    assert [r.message.startswith("momentum counts twice") for r in caplog.records] == [True] * warns
