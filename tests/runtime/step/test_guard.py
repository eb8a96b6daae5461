"""The guard: how far means are from dense ones, alike on all ranks, and what auto does
of it.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.contract import Member
from gradwire.errors import InvalidSetting
from gradwire.exchange.local import drive
from gradwire.runtime.step.guard import Compare, Guard, Missed, compared, loses
from tests.pilot.test_auto import SETTINGS, seen
from tests.runtime.ranks import Ranks
from tests.runtime.training import SMALL_MB, Net, digest, momentum, train

TOPK = gw.exchange_for(gw.compress.topk(density=0.1))


def test_a_comparison_is_that_of_the_means() -> None:
    grads = [
        torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(3)
    ]
    dense_N = torch.stack(grads).mean(0)
    spec = gw.TensorSpec("g", 1000)
    given = [grad_N.clone() for grad_N in grads]
    all_steps = [
        compared(me, g, TOPK.synchronise(me, TOPK.init(spec, 3), g, g))
        for me, g in zip([Member(r, 3) for r in range(3)], given, strict=True)
    ]
    found = [missed for _, missed in drive(all_steps, seed=0).results]
    assert found == found[:1] * 3, "the same bits on all ranks"
    assert found[0].error == pytest.approx(
        float((given[0] - dense_N).norm()) ** 2, rel=1e-5
    )
    assert found[0].dense == pytest.approx(float(dense_N.norm()) ** 2, rel=1e-5)
    want = gw.run_local(TOPK, grads)[0][0]
    assert torch.equal(given[0], want), "the mean is as without"


class Sent:
    """What a guard sees of a message."""

    def __init__(self, name: str, exchange: gw.Exchange = TOPK) -> None:
        self.names, self.exchange = [name], exchange
        self.compare: Compare | None = None
        self.missed: Missed | None = Missed(1.0, 4.0)


def test_all_messages_come_up_in_turn_and_only_lossy_ones() -> None:
    sent: list[Any] = [Sent(f"layer {n}") for n in range(9)]
    sent.append(Sent("dense", gw.exchange_for(gw.compress.none())))
    guard, seen_in = Guard(every=5), []
    for step in range(20):
        guard.begin(step, sent)
        compared_now = [one.names[0] for one in sent if one.compare]
        assert bool(compared_now) is (step % 5 == 4)
        seen_in += compared_now
    assert {*seen_in} == {f"layer {n}" for n in range(9)}
    assert not loses(sent[-1].exchange)


def test_readings_are_added_up_and_what_is_not_finite_is_left_out() -> None:
    sent: list[Any] = [Sent("first"), Sent("second")]
    guard = Guard(every=1)
    assert guard.take() is None
    for step, missed in enumerate(
        [Missed(1.0, 4.0), Missed(float("nan"), 1.0), Missed(3.0, 0.0)]
    ):
        sent[1].missed = missed
        guard.begin(step, sent)
        guard.end(step, sent, rank=1)
    assert guard.reading == {
        "step": 2,
        "error": 0.5,
        "worst": "first",
        "worst_error": 0.5,
    }
    assert guard.take() == 0.5
    assert guard.take() is None


def guarded(rank: int, world: int, every: int | None) -> tuple[str, Any]:
    net = Net()
    handle = gw.attach(
        net, TOPK, options=gw.Options(bucket_cap_mb=SMALL_MB, guard_every=every)
    )
    train(net, momentum(net.parameters()), rank, range(5))
    return digest(net), handle.stats()["guard"]


@pytest.mark.multi
def test_stats_tell_it_on_all_ranks_alike_and_training_is_as_without(
    two: Ranks,
) -> None:
    (one, read), other = two.run(guarded, 2)
    assert (one, read) == other
    assert read["step"] == 3
    assert 0 < read["error"] <= read["worst_error"] < 2
    assert two.run(guarded, None) == [(one, None)] * 2


def test_rank_0_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = [Sent("first")]
    for rank in (0, 1):
        guard = Guard(every=1)
        guard.begin(7, sent)
        with caplog.at_level(logging.INFO, logger="gradwire"):
            guard.end(7, sent, rank)
    (said,) = caplog.messages
    assert said.startswith("step 7: means are off the dense ones by 0.5 of their norm")


def test_means_of_decoupled_momentum_are_refused() -> None:
    exchange, options = (
        gw.with_decoupled_momentum(gw.compress.topk()),
        gw.Options(guard_every=10),
    )
    with pytest.raises(InvalidSetting, match="exchange beside guard_every"):
        gw.attach(Net(), exchange, options=options)


def stepped_back(rank: int, world: int) -> tuple[str, dict[str, Any]]:
    """Under auto, with plans of onebit, of whose misses "safe" is to allow less."""
    net = Net()
    optimizer = momentum(net.parameters())
    with seen(step_s=[0.4, 0.1], allowed={"safe": 0.01}):
        handle = gw.attach(net, gw.pilot.auto(**SETTINGS), optimizer=optimizer)
        train(net, optimizer, rank, range(20))
        pilot = handle.stats()["pilot"]
        handle.detach()
    return digest(net), pilot


@pytest.mark.slow
@pytest.mark.multi
def test_auto_takes_a_stricter_fidelity_where_means_are_too_far_off(two: Ranks) -> None:
    (one, pilot), (other, _) = two.run(stepped_back)
    assert one == other
    assert pilot["fidelity"] == "half"
    (said,) = [text for text in pilot["decisions"] if "stricter" in text]
    assert "0.01 is allowed" in said
