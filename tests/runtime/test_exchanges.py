"""Training by every kind of exchange on real ranks, several messages at once.

Ranks hold the bits that the local driver gives for the same messages. A run that was
saved and resumed is the uninterrupted one. Among another number of ranks all that is
pending is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Exchange, Member
from gradwire.contract.spec import TensorSpec
from gradwire.contract.state import leaves
from gradwire.errors import InvalidSetting
from gradwire.exchange.local import drive
from gradwire.planning.data.plan import ExchangeSetting, Plan
from gradwire.runtime.step.layout import Slot
from gradwire_lab.exchange.adapt import choose_together
from tests.each import each, few
from tests.laws.variable import above
from tests.runtime.given import SMALL, keywords
from tests.runtime.plans import CLUSTER, drawn, profile_of_model, through
from tests.runtime.ranks import Ranks
from tests.runtime.state.test_checkpoint import through_a_file
from tests.runtime.training import (
    EXCHANGES,
    ONEBIT,
    SMALL_MB,
    Net,
    ddp,
    digest,
    everything,
    loss_of,
    momentum,
    named,
    train,
)

pytestmark = pytest.mark.multi
SAVED_AT, NUM_STEPS = 3, 5

codecs, feedback = gw.compress, gw.with_error_feedback
FEW = above(threshold=0.05)
VARYING = feedback(gw.pair(FEW, gw.collective.allgather_sparse()))
SERVED = feedback(gw.pair(FEW, gw.collective.casync_ps()))
QSGD = gw.exchange_for(codecs.qsgd(block=64))
POWER = gw.exchange_for(codecs.powersgd(rank=2))
DEFT, OKTOPK = (
    gw.exchange_for(make(density=0.3)) for make in (codecs.deft, codecs.oktopk)
)
DGC = gw.deep_gradient_compression(
    warmup_steps=6, density=0.05, nesterov=True, clip_norm=1.0, sample_share=1.0
)
"""Of three stages: it is saved and resumed inside the second."""
MEASURED = gw.with_measured_scheme(codecs.topk(density=0.1), num_steps=SAVED_AT + 1)
"""It is saved and resumed while it measures."""
ADAPTED = gw.adapt(codecs.topk(density=0.1), every=2)
"""Settings were chosen when it is saved, and are chosen anew after it is resumed."""
KINDS = (VARYING, QSGD, POWER, DGC, MEASURED)
"""Sizes that vary, drawn numbers, two phases, stages and measurements."""
MORE_KINDS = (
    *(ONEBIT, DEFT, OKTOPK, ADAPTED),
    *(gw.exchange_for(make(density=0.3)) for make in (codecs.randomk, codecs.spardl)),
)
AMONG_FOUR = (
    SERVED,
    gw.pair(codecs.terngrad(), gw.collective.casync_ring()),
    gw.exchange_for(codecs.spardl(density=0.3, teams=2)),
)
"""Payloads that vary in size, and numbers that ranks draw: their sums have one order.
And teams.
"""


def kind(exchange: Exchange) -> tuple[str, frozenset[str], bool]:
    """What the runtime has to do with an exchange: its verbs, the state it saves, and
    where.
    """
    inner = getattr(exchange, "inner", exchange)
    state = exchange.init(TensorSpec("message", 120, shapes=((10, 12),)), 2)
    paths = frozenset(path for path, _ in leaves(state))
    of_verbs = getattr(inner, "collective", type(inner))
    return repr(of_verbs), paths, exchange.declared.host_only


EVERY = (
    *EXCHANGES,
    gw.with_momentum_correction(codecs.deft(density=0.1)),
    gw.adapt(codecs.qsgd(block=64), error=0.2, every=2),
    gw.adapt(codecs.powersgd(rank=2), every=2),
)
KNOWN = {*map(kind, (*KINDS, *MORE_KINDS, *AMONG_FOUR))}
OTHERS = [
    *{kind(one): one for one in reversed(EVERY) if kind(one) not in KNOWN}.values()
]
"""One exchange of every other kind: ``tests/laws`` has all exchanges, by the same
texts.
"""


class Parcel(NamedTuple):
    """What one message carries."""

    spec: TensorSpec
    slots: list[Slot]


class Found(NamedTuple):
    """The bits that a rank ends with, and those to compare them with."""

    whole: str
    resumed: str
    locally: str
    num_messages: int
    sent_bytes: float


def started(
    exchange: Exchange, wrapped: bool, plan: Plan | None, seed: int
) -> tuple[Any, ...]:
    """A model, what is trained of it, its handle and its optimizer; a plan takes
    ``exchange``.
    """
    net = Net(seed)
    model = ddp(net, broadcast_buffers=False) if wrapped else net
    optimizer = momentum(net.parameters())
    if plan is None:
        given = keywords(bucket_cap_mb=SMALL_MB, compress_if=everything)
        handle = gw.attach(model, exchange, **given)
    else:
        handle = gw.attach(model, plan, optimizer=optimizer)
    return net, model, handle, optimizer


def trained(
    rank: int, world: int, exchange: Exchange, wrapped: bool, plan: Plan | None = None
) -> Found:
    net, model, handle, optimizer = started(exchange, wrapped, plan, 0)
    parcels = [Parcel(m.spec, m.slots) for m in handle._synchroniser.messages]
    train(model, optimizer, rank, range(SAVED_AT))
    states = through_a_file(
        [net.state_dict(), optimizer.state_dict(), handle.state_dict()]
    )
    train(model, optimizer, rank, range(SAVED_AT, NUM_STEPS))
    sent = handle.stats()["wire_bytes_per_step"]
    handle.synchronize()
    whole, owed = digest(net), digest(handle.residuals().values())
    handle.detach()

    other, model, handle, optimizer = started(exchange, wrapped, plan, 1)
    for part, state in zip((other, optimizer, handle), states, strict=True):
        part.load_state_dict(state)
    train(model, optimizer, rank, range(SAVED_AT, NUM_STEPS))
    handle.synchronize()
    assert handle.step == NUM_STEPS
    assert digest(handle.residuals().values()) == owed
    handle.detach()
    local = locally(world, exchange, parcels) if rank == 0 else whole
    return Found(whole, digest(other), local, len(parcels), sent)


def locally(world: int, exchange: Exchange, parcels: list[Parcel]) -> str:
    """The bits of the same training, with all ranks in this process."""
    nets = [Net() for _ in range(world)]
    optimizers = [momentum(net.parameters()) for net in nets]
    states = [[exchange.init(parcel.spec, world) for _ in nets] for parcel in parcels]
    for step in range(NUM_STEPS):
        for other, net in enumerate(nets):
            optimizers[other].zero_grad()
            loss_of(net, other, step).backward()
        for order, parcel in enumerate(parcels):
            ranges = [_ranges(net, parcel) for net in nets]
            grads = [torch.cat(own) for own in ranges]
            all_steps = [
                exchange.synchronise(Member(rank, world, order), state, grad_N, grad_N)
                for rank, (state, grad_N) in enumerate(
                    zip(states[order], grads, strict=True)
                )
            ]
            states[order] = drive(all_steps).results
            for own, mean_N in zip(ranges, grads, strict=True):
                for part, slot in zip(own, parcel.slots, strict=True):
                    part.copy_(mean_N[slot.start : slot.stop])
        for of_rank in zip(*states, strict=True):
            choose_together([(exchange, state) for state in of_rank])
        for optimizer in optimizers:
            optimizer.step()
    return digest(nets[0])


def _ranges(net: Net, parcel: Parcel) -> list[Tensor]:
    """Views of the gradients that a message carries."""
    params = dict(net.named_parameters())
    found = []
    for slot in parcel.slots:
        grad = params[slot.name].grad
        assert grad is not None
        found.append(grad.view(-1)[slot.first : slot.last])
    return found


def check(
    pool: Ranks, exchange: Exchange, wrapped: bool, plan: Plan | None = None
) -> None:
    found = pool.run(trained, exchange, wrapped, plan)
    assert len({one.whole for one in found}) == 1, "replicas differ"
    for one in found:
        assert one.locally == one.whole, "real and local ranks differ"
        assert one.resumed == one.whole, "a resumed run is another one"
        assert one.num_messages >= 3
        assert one.sent_bytes > 0


@few(
    "place, exchange",
    enumerate(KINDS),
    fast=3,
    ids=["varying", "drawn", "phases", "stages", "measured"],
)
def test_real_ranks_are_local_ones_and_a_resumed_run_the_uninterrupted_one(
    place: int, exchange: Exchange, two: Ranks
) -> None:
    """Modules and DDP by turns. Among two ranks a library's sum is the same in any
    order.
    """
    check(two, exchange, place % 2 == 1)


@pytest.mark.slow
@each("place, exchange", enumerate(MORE_KINDS), ids=str)
def test_so_they_are_by_further_exchanges(
    place: int, exchange: Exchange, two: Ranks
) -> None:
    check(two, exchange, place % 2 == 0)


@few("exchange", AMONG_FOUR, fast=2, ids=named)
def test_four_ranks_compute_what_local_ranks_do(
    exchange: Exchange, four: Ranks
) -> None:
    check(four, exchange, wrapped=False)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", OTHERS, ids=named)
def test_every_exchange_trains_as_local_ranks_do(
    exchange: Exchange, two: Ranks
) -> None:
    check(two, exchange, OTHERS.index(exchange) % 2 == 0)


def test_a_plan_may_name_an_exchange_of_whole_tensors(two: Ranks) -> None:
    setting = ExchangeSetting(
        compressor="powersgd", settings={"rank": 2}, error_feedback=True
    )
    profile = profile_of_model(Net())
    check(
        two,
        POWER,
        False,
        through(gw.planner.wfbp(profile, CLUSTER), "low rank", setting),
    )
    cut = through(drawn(0), "low rank", setting)
    said = r"message \d+ sends elements \d+:\d+ of .* powersgd, which takes whole"
    with pytest.raises(InvalidSetting, match=said):
        gw.attach(Net(), cut)
    with pytest.raises(InvalidSetting, match=said):
        gw.simulate(cut, profile, CLUSTER)


def saved(rank: int, world: int, exchange: Exchange) -> dict[str, Any]:
    net = Net()
    handle = gw.attach(net, exchange, options=SMALL)
    train(net, momentum(net.parameters()), rank, range(SAVED_AT))
    return through_a_file(handle.state_dict())  # type: ignore[no-any-return]


def continued(
    rank: int, world: int, exchange: Exchange, states: list[dict[str, Any]]
) -> str:
    """Goes on with all parameters in one message, where state is found by parameter."""
    net = Net()
    handle = gw.attach(net, exchange, options=gw.Options(bucket_cap_mb=64))
    handle.load_state_dict(states[rank])
    loaded = handle.state_dict()
    for name, fields in states[rank]["params"].items():
        assert loaded["params"][name].keys() == fields.keys()
        assert all(
            torch.equal(loaded["params"][name][path], fields[path]) for path in fields
        )
    assert handle.step == SAVED_AT
    train(net, momentum(net.parameters()), rank, range(SAVED_AT, NUM_STEPS))
    return digest(net)


@each("exchange, old, new", [(OKTOPK, 2, 4), (DGC, 4, 2)], ids=str)
def test_other_ranks_and_messages_go_on_with_what_is_pending(
    exchange: Exchange, old: int, new: int, pools: dict[int, Ranks]
) -> None:
    """Residuals and velocities keep their mean. All ranks have the other fields
    alike.
    """
    check_pending(exchange, old, new, pools)


@pytest.mark.slow
@each("exchange", [DEFT, POWER, ADAPTED], ids=str)
def test_so_they_do_by_further_exchanges(
    exchange: Exchange, pools: dict[int, Ranks]
) -> None:
    check_pending(exchange, 2, 4, pools)


def check_pending(
    exchange: Exchange, old: int, new: int, pools: dict[int, Ranks]
) -> None:
    states = pools[old].run(saved, exchange)
    shared = gw.redistribute(states[::-1], new)
    num_pending = 0
    for name, fields in states[0]["params"].items():
        for path, own in fields.items():
            before, after = (
                torch.stack([one["params"][name][path].double() for one in ranks])
                for ranks in (states, shared)
            )
            if path.endswith("_N"):
                num_pending += bool(before.any())
                torch.testing.assert_close(after.mean(0), before.mean(0))
            else:
                assert all(torch.equal(one, own.double()) for one in after)
    assert num_pending >= 4
    of_messages = [fields for one in shared for fields in one["messages"].values()]
    steps = {int(m[path]) for m in of_messages for path in m if path.endswith(".step")}
    assert steps <= {SAVED_AT}
    assert len(set(pools[new].run(continued, exchange, shared))) == 1
