"""Payloads that vary in size and ranks that draw numbers of their own, on real process groups.

Training under ``attach`` is what ``run_local`` gives for the same messages, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.spec import TensorSpec
from gradwire.planning.data.plan import ExchangeSetting, Plan
from gradwire.runtime.step.messages import Slot
from tests.laws.variable import above
from tests.runtime.given import keywords
from tests.runtime.plans import drawn, through
from tests.runtime.ranks import Ranks
from tests.runtime.test_checkpoint import resumed
from tests.runtime.training import (
    SMALL_MB,
    Net,
    digest,
    everything,
    loss_of,
    momentum,
    named,
    train,
)

pytestmark = [pytest.mark.multi, pytest.mark.slow]
NUM_STEPS = 8

FEW = above(threshold=0.05)
VARIABLE = [
    gw.with_error_feedback(gw.pair(FEW, gw.collective.allgather_sparse())),
    gw.with_error_feedback(gw.pair(FEW, gw.collective.casync_ps())),
    gw.exchange_for(gw.compress.dgc(density=0.1)),
    gw.exchange_for(gw.compress.graddrop(density=0.1)),
    gw.exchange_for(gw.compress.adacomp(block=64)),
    gw.exchange_for(gw.compress.threelc(sparsity=1.75)),
]
DRAWN = [
    gw.exchange_for(gw.compress.qsgd(block=64)),
    gw.pair(gw.compress.terngrad(), gw.collective.casync_ring()),
]


class Parcel(NamedTuple):
    """What one message carries."""

    spec: TensorSpec
    slots: list[Slot]


def attached(
    rank: int, world: int, exchange: Exchange, plan: Plan | None
) -> tuple[str, str, float, int]:
    """Bits of the trained model, and of run_local's; bytes sent a step, and messages.

    A plan's messages all take ``exchange``.
    """
    net = Net()
    optimizer = momentum(net.parameters())
    if plan is None:
        handle = gw.attach(
            net, exchange, **keywords(bucket_cap_mb=SMALL_MB, compress_if=everything)
        )
    else:
        handle = gw.attach(net, plan, optimizer=optimizer)
    parcels = [Parcel(m.spec, m.slots) for m in handle.synchroniser.messages]
    train(net, optimizer, rank, range(NUM_STEPS))
    sent = handle.stats()["wire_bytes_per_step"]
    handle.detach()
    return digest(net), locally(rank, world, exchange, parcels), sent, len(parcels)


def locally(rank: int, world: int, exchange: Exchange, parcels: list[Parcel]) -> str:
    """The same training of all ranks in this process."""
    nets = [Net() for _ in range(world)]
    optimizers = [momentum(net.parameters()) for net in nets]
    states = [[exchange.init(parcel.spec, world)] * world for parcel in parcels]
    for step in range(NUM_STEPS):
        for other, net in enumerate(nets):
            optimizers[other].zero_grad()
            loss_of(net, other, step).backward()
        for number, parcel in enumerate(parcels):
            ranges = [_ranges(net, parcel) for net in nets]
            results = gw.run_local(exchange, [torch.cat(own) for own in ranges], states[number])
            states[number] = [state for _, _, state in results]
            for own, (mean_N, _, _) in zip(ranges, results, strict=True):
                for part, slot in zip(own, parcel.slots, strict=True):
                    part.copy_(mean_N[slot.start : slot.stop])
        for optimizer in optimizers:
            optimizer.step()
    return digest(nets[rank])


def _ranges(net: Net, parcel: Parcel) -> list[Tensor]:
    """Views of the gradients that a message carries."""
    params = dict(net.named_parameters())
    found = []
    for slot in parcel.slots:
        grad = params[slot.name].grad
        assert grad is not None
        found.append(grad.view(-1)[slot.first : slot.last])
    return found


def check(pool: Ranks, exchange: Exchange, plan: Plan | None = None) -> list[float]:
    """Bytes that ranks sent a step."""
    found = pool.run(attached, exchange, plan)
    assert len({bits for bits, *_ in found}) == 1, "replicas differ"
    for bits, local_bits, _, num_messages in found:
        assert bits == local_bits, "attach and run_local differ"
        assert num_messages >= 3
    return [sent for _, _, sent, _ in found]


@pytest.mark.parametrize("exchange", DRAWN, ids=named)
def test_drawn_numbers_are_those_of_run_local(exchange: Exchange, four: Ranks) -> None:
    check(four, exchange)


@pytest.mark.parametrize("exchange", VARIABLE, ids=named)
@pytest.mark.parametrize("world", [2, 4])
def test_payloads_that_vary(exchange: Exchange, world: int, request: pytest.FixtureRequest) -> None:
    sent = check(request.getfixturevalue({2: "two", 4: "four"}[world]), exchange)
    numel = sum(p.numel() for p in Net().parameters())
    dense = 2 * (world - 1) / world * 4 * numel
    assert all(0 < own < 0.8 * dense for own in sent), f"{sent} bytes a step, {dense} uncompressed"


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_payloads_that_vary_under_plans_of_any_shape(seed: int, four: Ranks) -> None:
    """Cut and fused at random, several on the wire at once, overlapping the next forward pass."""
    setting = ExchangeSetting(
        compressor="graddrop",
        settings={"density": 0.1},
        collective="allgather_sparse",
        error_feedback=True,
    )
    exchange = gw.exchange_for(gw.compress.graddrop(density=0.1))
    check(four, exchange, through(drawn(seed), "dropped", setting))


@pytest.mark.parametrize("exchange", [*VARIABLE[1:3], DRAWN[0]], ids=named)
def test_a_resumed_run_is_the_uninterrupted_one(exchange: Exchange, two: Ranks) -> None:
    for whole, again, _ in two.run(resumed, exchange, False):
        assert whole == again


class cramped(above):
    """On rank 0 has room for payloads of one element, on the others of all."""

    def for_world(self, world: int, rank: int = 0) -> above:
        return above(threshold=-1.0) if rank else self

    def format(self, spec: TensorSpec) -> gw.Format:
        return self.layout(spec, 1)


def beyond(rank: int, world: int) -> str:
    exchange = gw.with_error_feedback(gw.pair(cramped(), gw.collective.allgather_sparse()))
    net = Net()
    gw.attach(net, exchange, options=gw.Options(compress_if=everything))
    with pytest.raises(gw.InvalidSetting if rank == 0 else gw.RankFailed) as raised:
        train(net, momentum(net.parameters()), rank, range(1))
    return str(raised.value)


def test_a_payload_beyond_its_largest_ends_the_run_with_an_error(doomed: Ranks) -> None:
    texts = [outcome.value for outcome in doomed.outcomes(beyond)]
    assert all("announces a payload of" in text for text in texts), texts
