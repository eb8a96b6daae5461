"""Servers that hold no model: real ranks train the bits of local ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import beside
from gradwire.planning.data.plan import (
    Bulk,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.liveness.pulse import Pulse
from tests.each import each
from tests.laws.variable import above
from tests.runtime.given import keywords
from tests.runtime.local_steps.test_partial_steps import await_event, happens
from tests.runtime.ranks import Ranks
from tests.runtime.test_exchanges import NUM_STEPS, Parcel, locally
from tests.runtime.training import (
    SMALL_MB,
    Net,
    digest,
    everything,
    momentum,
    named,
    train,
)

pytestmark = pytest.mark.multi


def served(codec: Any, servers: int, **settings: Any) -> Exchange:
    collective = gw.collective.casync_ps(servers=servers, **settings)
    return gw.with_error_feedback(gw.pair(codec, collective))


ONEBIT = gw.compress.onebit(block=64)
EXCHANGES = (
    served(ONEBIT, 2),
    served(ONEBIT, 1, room_bytes=0),
    served(above(threshold=0.05), 2, partitions=1),
)


class Served(NamedTuple):
    """The bits that a rank ends with, and those to compare them with."""

    whole: str
    locally: str


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def trained(rank: int, world: int, exchange: Exchange, servers: int) -> Any:
    given = keywords(bucket_cap_mb=SMALL_MB, compress_if=everything)
    if rank >= world - servers:
        model = on_meta()
        gw.serve(model, exchange, **given)
        return sum(p.untyped_storage().size() for p in model.parameters())
    model = Net(seed=rank)  # rank 0's values are the model's
    optimizer = momentum(model.parameters())
    handle = gw.attach(model, exchange, **given)
    parcels = [Parcel(m.spec, m.slots) for m in handle._synchroniser.messages]
    train(model, optimizer, rank, range(NUM_STEPS))
    handle.detach()
    return Served(digest(model), locally(world, exchange, parcels))


@each("exchange", EXCHANGES, ids=named)
def test_workers_train_the_bits_of_local_ranks(exchange: Any, four: Ranks) -> None:
    servers = exchange.inner.collective.servers
    found = four.run(trained, exchange, servers)
    workers = found[: 4 - servers]
    assert {one.whole for one in workers} == {workers[0].locally}
    assert found[4 - servers :] == [0] * servers, "a server holds a model"


def vectors(rank: int, world: int) -> Any:
    """Vectors travel uncompressed, and one layer is never used."""
    exchange = served(ONEBIT, 1)
    if rank == world - 1:
        model: nn.Module = nn.ModuleDict({"net": on_meta(), "idle": nn.Linear(2, 2)})
        return gw.serve(model.to("meta"), exchange)
    net = Net()
    model = nn.ModuleDict({"net": net, "idle": nn.Linear(2, 2)})
    handle = gw.attach(model, exchange)
    exchanges = {repr(m.exchange) for m in handle._synchroniser.messages}
    train(net, momentum(net.parameters()), rank, range(3))
    handle.detach()
    return digest(net), exchanges, model["idle"].weight.grad


def test_vectors_go_to_servers_too_and_idle_layers_have_no_gradient(
    four: Ranks,
) -> None:
    *workers, _ = four.run(vectors)
    assert len({bits for bits, _, _ in workers}) == 1
    exchange = served(ONEBIT, 1)
    assert workers[0][1] == {repr(exchange), repr(beside(exchange))}
    assert all(grad is None for _, _, grad in workers)


PLANNED = ExchangeSetting(
    compressor="onebit",
    collective="casync_ps",
    collective_settings={"servers": 2},
    error_feedback=True,
)


def plan_of(*, bulk: bool = False, overlaps: bool = False, dense: bool = False) -> Plan:
    messages = [
        PlannedMessage(
            chunks=(Chunk(tensor=name, start=0, stop=param.numel()),),
            exchange="dense" if dense and not place else "served",
        )
        for place, (name, param) in enumerate(reversed([*Net().named_parameters()]))
    ]
    return Plan(
        planner="test",
        model="Net",
        messages=tuple(messages),
        credit=2,
        exchanges={"served": PLANNED},
        overlap_forward=overlaps,
        bulk=Bulk(timeout_s=0.0) if bulk else None,
    )


def planned(rank: int, world: int, **features: bool) -> str | None:
    plan = plan_of(**features)
    if rank >= 2:
        gw.serve(on_meta(), plan)
        return None
    model = Net()
    optimizer = momentum(model.parameters())
    handle = gw.attach(model, plan, optimizer=optimizer)
    train(model, optimizer, rank, range(NUM_STEPS))
    handle.synchronize()
    handle.detach()
    return digest(model)


def test_plans_with_overlap_and_with_a_coordinator_train_the_same_bits(
    four: Ranks,
) -> None:
    found = [
        digests
        for features in ({}, {"bulk": True}, {"overlaps": True})
        for digests in four.run(_planned, features)[:2]
    ]
    assert len(set(found)) == 1


def _planned(rank: int, world: int, features: dict[str, bool]) -> str | None:
    return planned(rank, world, **features)


# ---- refusals ------------------------------------------------------------------------


def refused(rank: int, world: int, call: Callable[[int], Any]) -> str:
    with pytest.raises(InvalidSetting) as caught:
        call(rank)
    return str(caught.value)


def all_attach(rank: int) -> None:
    gw.attach(Net(), served(ONEBIT, 1))


def all_serve(rank: int) -> None:
    gw.serve(on_meta(), served(ONEBIT, 1))


def one_is_dense(rank: int) -> None:
    plan = plan_of(dense=True)
    gw.serve(on_meta(), plan) if rank == 3 else gw.attach(Net(), plan)


def shrinks(rank: int) -> None:
    gw.attach(Net(), served(ONEBIT, 1), **keywords(on_failure="shrink"))


@each(
    "call, text",
    [
        (all_attach, "this is rank 3 of 4: call gw.attach on ranks below 3"),
        (all_serve, "and gw.serve on all others"),
        (one_is_dense, "the same in all messages of a plan"),
        (shrinks, "servers must be None beside on_failure"),
    ],
)
def test_what_does_not_go_together_is_refused(
    call: Any, text: str, four: Ranks
) -> None:
    found = four.run(refused, call)
    assert any(text in one for one in found), found


def saved(rank: int, world: int) -> str:
    exchange = served(ONEBIT, 1)
    if rank == world - 1:
        gw.serve(on_meta(), exchange)
        return ""
    handle = gw.attach(Net(), exchange)
    with pytest.raises(InvalidSetting, match="servers keep state") as caught:
        handle.state_dict()
    handle.detach()
    return str(caught.value)


def test_a_state_is_refused_as_servers_keep_a_part_of_it(two: Ranks) -> None:
    assert two.run(saved)[0]


# ---- losses --------------------------------------------------------------------------


def lose(rank: int, world: int, lost: int) -> str:
    exchange = served(ONEBIT, 1)
    try:
        if rank == world - 1:
            if rank == lost:
                handle_death()
            gw.serve(on_meta(), exchange)
            return "ended"
        model = Net()
        optimizer = momentum(model.parameters())
        gw.attach(model, exchange)
        train(model, optimizer, rank, range(1))
        if rank == lost:
            os._exit(1)
        train(model, optimizer, rank, range(1, 4))
    except gw.RankFailed as error:
        return f"{error.ranks}"
    return "trained"


def falls_silent(rank: int, world: int) -> tuple[int, ...]:
    """Rank 0, which makes no step, shows no sign of life."""
    exchange = served(ONEBIT, 1)
    if rank == 0:
        model = Net()
        handle = gw.attach(model, exchange)
        # the server may end within a step
        with suppress(gw.RankFailed):
            train(model, momentum(model.parameters()), rank, range(2))
        await_event("the server has ended")
        with suppress(gw.RankFailed):
            handle.detach()
        return ()

    def still_s(pulse: Pulse, other: int) -> float:
        return 1e9 if other == 0 else 0.0

    def refuse_silence(engine: Engine, step: int) -> None:
        raise engine.lose((0,), step, "rank 0 is silent", "this test")

    Pulse.still_s = still_s  # type: ignore[method-assign]
    Engine.refuse_silence = refuse_silence  # type: ignore[method-assign]
    with pytest.raises(gw.RankFailed) as caught:
        gw.serve(on_meta(), exchange)
    happens("the server has ended")
    return caught.value.ranks


def test_a_server_looks_for_rank_0_between_two_steps(doomed_two: Ranks) -> None:
    assert doomed_two.run(falls_silent) == [(), (0,)]


def handle_death() -> None:
    """The server ends before its second step."""
    hears = Engine.hears_of_step
    heard: list[Engine] = []

    def ends(engine: Engine) -> bool:
        heard.append(engine)
        if len(heard) == 2:
            os._exit(1)
        return hears(engine)

    Engine.hears_of_step = ends  # type: ignore[method-assign]


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_lost_rank_is_named_on_all(lost: int, doomed: Ranks) -> None:
    doomed.start()
    doomed.send(lose, lost)
    for text in doomed.survivors([lost]):
        assert text == f"({lost},)"


def ends_without_detach(rank: int, world: int) -> str:
    exchange = served(ONEBIT, 1)
    if rank == world - 1:
        gw.serve(on_meta(), exchange)
        return "served"
    model = Net()
    gw.attach(model, exchange)
    train(model, momentum(model.parameters()), rank, range(2))
    return "trained"


def test_a_server_ends_once_a_model_is_dropped(two: Ranks) -> None:
    assert two.run(ends_without_detach) == ["trained", "served"]
