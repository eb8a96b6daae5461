"""State is saved by parameter and moves to other exchanges. State that does not fit is
refused.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.state import leaves
from gradwire.errors import InvalidSetting, RanksDiffer
from gradwire.exchange.error_feedback import ErrorFeedback, residuals
from gradwire.exchange.two_level import on_hosts
from gradwire.runtime.state.checkpoint import collect, loaded, move
from gradwire.runtime.state.table import ENTRIES, Origin
from gradwire.runtime.step.layout import ParamRange
from gradwire.runtime.step.messages import Message
from tests.each import each
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    TOPK,
    Net,
    adamw,
    named,
    train,
)

pytestmark = pytest.mark.multi


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Count(NamedTuple):
    """How often each element was encoded."""

    times_N: Tensor


class counting(gw.compress.cast16):
    """Keeps something of each element; of a chunk's elements, where a collective cuts
    chunks.
    """

    def init(self, spec: gw.TensorSpec) -> Count:
        return Count(torch.zeros(spec.numel))

    def encode(
        self, state: Count, grad_N: Tensor, **to: Any
    ) -> tuple[gw.Payload, Count]:
        payload, _ = super().encode(None, grad_N, **to)
        return payload, Count(state.times_N + 1)


def counts(rank: int, world: int) -> None:
    for collective in (gw.collective.casync_ps(), gw.collective.allreduce()):
        exchange = gw.with_error_feedback(gw.pair(counting(), collective))
        net = Net()
        handle = gw.attach(net, exchange, options=SMALL)
        train(net, adamw(net.parameters()), rank, range(3))
        saved = through_a_file(handle.state_dict())
        handle.detach()
        net.zero_grad()
        handle = gw.attach(net, exchange, options=SMALL)
        handle.load_state_dict(saved)
        states = [message.state for message in handle._progress.messages]
        found = [
            t
            for state in states
            for path, t in leaves(state)
            if path.endswith("times_N")
        ]
        assert found
        assert all(bool((tensor == 3).all()) for tensor in found)
        handle.detach()


def test_what_a_codec_keeps_is_saved_however_it_is_cut(two: Ranks) -> None:
    two.run(counts)


def test_what_is_kept_of_a_chunk_starts_afresh_among_other_ranks() -> None:
    exchange = gw.with_error_feedback(gw.pair(counting(), gw.collective.casync_ps()))

    def messages(rank: int, world: int) -> list[Message]:
        part = ParamRange.whole("weight", torch.zeros(40, 30))
        return [Message(0, [part], exchange, rank, world)]

    def saved(rank: int) -> dict[str, Any]:
        made = messages(rank, 2)
        for _, tensor in leaves(made[0].state):
            tensor.fill_(7)
        return collect(made, Origin("any", 2, rank, "part 0 of 1"), step=1)

    shared = gw.redistribute([saved(0), saved(1)], 4)
    [state] = loaded(shared[3], messages(3, 4), Origin("any", 4, 3, "part 0 of 1"))
    counts = [t for path, t in leaves(state) if path.endswith("times_N")]
    assert len(counts) == 4
    assert not any(bool(t.any()) for t in counts)


KEEPING = (
    TOPK,
    ErrorFeedback(TOPK),
    gw.with_momentum_correction(gw.compress.topk(density=0.1)),
)


@each("old", [*KEEPING, ErrorFeedback(KEEPING[2])], ids=named)
def test_all_that_is_owed_moves_to_whatever_exchange_comes_next(old: Exchange) -> None:
    """Residuals are added up where the new exchange has fewer of them, however it cuts
    messages.
    """
    weights = [ParamRange.whole(name, torch.zeros(8, 5)) for name in ("one", "other")]
    [before] = made = [Message(0, weights, old, 0, 3)]
    for residual_N in residuals(before.state).values():
        residual_N.copy_(torch.randn(80))
    for new in KEEPING:
        apart = [Message(i, [part], new, 0, 3) for i, part in enumerate(weights)]
        move(collect(made), apart)
        parts = [sum(residuals(message.state).values()) for message in apart]
        torch.testing.assert_close(
            torch.cat(parts), sum(residuals(before.state).values())
        )  # type: ignore[arg-type]


def test_a_setting_that_there_is_not_is_refused() -> None:
    part, origin = (
        ParamRange.whole("weight", torch.zeros(40, 30)),
        Origin("any", 2, 0, ""),
    )
    exchange = gw.adapt(gw.compress.powersgd(rank=2))
    messages = [Message(0, [part], exchange, 0, 2)]
    saved = collect(messages, origin, step=1)
    (path,) = (path for path in saved["params"]["weight"] if "rung_T" in path)
    for rung in range(4):
        saved["params"]["weight"][path].fill_(rung)
        loaded(saved, messages, origin)
    saved["params"]["weight"][path].fill_(4)
    with pytest.raises(InvalidSetting, match=r"rung_T of weight must be 0 to 3, got 4"):
        loaded(saved, messages, origin)


def state_of(rank: int, **other: Any) -> dict[str, Any]:
    made = collect([], Origin("any", 2, rank, "part 0 of 1"), step=1, run="a run")
    return {**made, "params": {"weight": {"residual_N": torch.ones(3)}}, **other}


def of_weight(residual_N: torch.Tensor) -> dict[str, Any]:
    return {"weight": {"residual_N": residual_N}}


@each(
    "states, world_size, said",
    [
        (lambda: [state_of(0)], 2, r"all 2 old ranks, got those of ranks \[0\]"),
        (lambda: [state_of(0), state_of(0)], 2, r"\[0, 0\]"),
        (
            lambda: [{"rank": 0}],
            2,
            r"state_dicts\[0\] is not a gradwire state_dict: it lacks algo",
        ),
        (
            lambda: [state_of(0), state_of(1, shard="part 1 of 2")],
            2,
            "redistribute each part's by",
        ),
        (
            lambda: [state_of(0), state_of(1)],
            0,
            "world_size must be a whole number, 1 to 2",
        ),
        (
            lambda: [state_of(0), state_of(1, step=2)],
            4,
            "0 and rank 1 .* step is 1 against 2",
        ),
        (
            lambda: [state_of(0), state_of(1, algorithm="b")],
            4,
            "algorithm is any against b",
        ),
        (lambda: [state_of(0), state_of(1, run="c")], 4, "run is a run against c"),
        (
            lambda: [state_of(0), state_of(1, version=1)],
            4,
            r"state_dicts\[1\] version must be 3",
        ),
        (
            lambda: [state_of(0), state_of(1, world_size=3)],
            4,
            "world_size is 2 against 3",
        ),
        (
            lambda: [state_of(0), state_of(1, params={})],
            4,
            "rank 1 .* has the parameter weight",
        ),
        (
            lambda: [state_of(0), state_of(1, params={"weight": {}})],
            4,
            "rank 1 .* only one of both has residual_N of weight",
        ),
        (
            lambda: [state_of(0), state_of(1, params=of_weight(torch.ones(3) / 0))],
            4,
            "residual_N of weight of rank 1 must be finite, got inf",
        ),
    ],
)
def test_redistribution_refuses_what_is_not_whole(
    states: Callable[[], list[dict[str, Any]]], world_size: int, said: str
) -> None:
    with pytest.raises(InvalidSetting, match=said):
        gw.redistribute(states(), world_size)


def test_the_table_has_every_entry_of_a_state() -> None:
    """Whoever adds an entry says there whether ranks have it in common."""
    assert state_of(0).keys() == {"version", *ENTRIES, "params", "messages"}
    assert ENTRIES.keys() > {*Origin._fields}


SHARED = [key for key, entry in ENTRIES.items() if entry.is_shared]


@each("key", SHARED, ids=SHARED)
def test_states_that_differ_in_what_ranks_share_are_no_checkpoint(key: str) -> None:
    own = state_of(0)[key]
    other = f"not {own}" if isinstance(own, str) else own + 1
    with pytest.raises(RanksDiffer, match=f"rank 0 and rank 1 .* {key} is {own} again"):
        gw.redistribute([state_of(0), state_of(1, **{key: other})], 4)


def of_hosts(exchange: Exchange, *, num_hosts: int) -> list[dict[str, Any]]:
    """The states of all ranks, two on each host, after a step of their own at every
    place.
    """
    world, hosts = 2 * num_hosts, on_hosts(exchange, 2)
    param = torch.zeros(64, 4)
    ranks = [
        Message(0, [ParamRange.whole("table", param)], hosts, rank, world)
        for rank in range(world)
    ]
    found = []
    for rank, message in enumerate(ranks):
        for path, held in message.rest_of_state().items():
            assert path == "inner.growth_1"
            # ranks at one place of their hosts have the same
            held.fill_(1.0 + rank % 2)
        origin = Origin("rows", world, rank, "", 2, f"place {rank % 2}")
        found.append(collect([message], origin, step=1, run="a run"))
    return found


def test_what_ranks_decide_by_is_one_hosts_after_another_number_of_ranks() -> None:
    """Ranks at different places of a host have exchanged different shares, and decided
    apart.
    """
    olds = of_hosts(
        gw.with_natural_sparsity(gw.compress.topk(density=0.1), 4), num_hosts=2
    )
    for world, ranks_per_host in ((2, 1), (3, 1), (4, 1), (8, 2)):
        news = gw.redistribute(olds, world, ranks_per_host)
        grown = {float(new["messages"]["table"]["inner.growth_1"]) for new in news}
        assert len(grown) == 1, grown
        assert {new["share"] for new in news} == {""}, "each has all of its host's"


HOSTED = gw.with_error_feedback(
    gw.pair(gw.compress.qsgd(bitwidth=8), gw.collective.casync_ps())
)
"""Draws for each chunk of a message; on hosts there are as many chunks as hosts."""


def of_flat_ranks(world: int) -> list[dict[str, Any]]:
    param = torch.zeros(600)
    found = []
    for rank in range(world):
        message = Message(0, [ParamRange.whole("w", param)], HOSTED, rank, world)
        next(iter(residuals(message.state).values())).fill_(float(rank + 1))
        found.append(
            collect([message], Origin("draws", world, rank), step=1, run="a run")
        )
    return found


def test_chunks_of_flat_ranks_are_none_of_as_many_ranks_on_hosts() -> None:
    """What is kept of a chunk starts afresh, as hosts cut other chunks."""
    news = gw.redistribute(of_flat_ranks(4), 4, 2)
    for rank, new in enumerate(news):
        param = ParamRange.whole("w", torch.zeros(600))
        message = Message(0, [param], on_hosts(HOSTED, 2), rank, 4)
        here = Origin("draws", 4, rank, "", 2, "the share of this rank")
        [state] = loaded(new, [message], here)
        held = next(iter(residuals(state).values()))
        # Host 0 has the ranks 0 and 2 of before, host 1 has 1 and 3; a mean is over two
        # hosts.
        assert held.tolist() == [(2.0, 3.0)[rank // 2]] * held.numel()


def test_states_that_are_redistributed_twice_owe_what_they_owed() -> None:
    """A host's ranks have all of their host's each, until they load it and keep their
    share.
    """
    first = of_flat_ranks(4)
    for number, per_host in ((4, 2), (2, 2), (6, 3), (8, 2)):
        on_some = gw.redistribute(first, number, per_host)
        back = gw.redistribute(on_some, 4, 1)
        again = gw.redistribute(gw.redistribute(on_some, 12, 4), 4, 1)
        for states in (back, again):
            total = sum(float(one["params"]["w"]["residual_N"][0]) for one in states)
            assert total == pytest.approx(1.0 + 2.0 + 3.0 + 4.0), (number, per_host)
