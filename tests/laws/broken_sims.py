"""Deliberately wrong networks and simulators, each wrong in the one thing its name says."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gradwire.contract.trace.span import Span, Trace
from gradwire.planning.simulation.network import Flow, Network
from gradwire.planning.simulation.timeline import simulate, simulate_exchange
from tests.laws import sim_laws as laws


class GivesEveryoneAll(Network):
    """No contention."""

    def _shares(self) -> dict[Flow, float]:
        return dict.fromkeys(self._flows, 1.0)


class WastesHalf(Network):
    def _shares(self) -> dict[Flow, float]:
        return {flow: share / 2 for flow, share in super()._shares().items()}


class FirstComeFirstServed(Network):
    """Who comes later gets what others leave of its sides, were it next to nothing."""

    def _shares(self) -> dict[Flow, float]:
        left: dict[int, float] = defaultdict(lambda: 1.0)
        shares = {}
        for flow in self._flows:
            sides = flow.sides or (0,)
            shares[flow] = max(1e-3, min(left[side] for side in sides) * 0.75)
            for side in sides:
                left[side] -= shares[flow]
        return shares


class OneWire(Network):
    """All transfers share one wire, whoever they are between."""

    def _shares(self) -> dict[Flow, float]:
        return dict.fromkeys(self._flows, 1 / max(1, len(self._flows)))


class HalfDuplex(Network):
    """A rank that transmits does not receive."""

    def transfer(self, src: int, dst: int, work_s: float, done: Callable[[], None]) -> Flow:
        flow = super().transfer(src, dst, work_s, done)
        flow.sides = (src, dst)
        return flow


class LosesWork(Network):
    """Whoever gets another share is forgiven half of what is left."""

    def _shares(self) -> dict[Flow, float]:
        shares = super()._shares()
        for flow, share in shares.items():
            if flow.share and share != flow.share:
                flow.left_s /= 2
        return shares


NETWORK_BITES = (
    (laws.law_alone_a_transfer_has_the_whole_link, WastesHalf),
    (laws.law_no_side_above_100_percent, GivesEveryoneAll),
    (laws.law_shares_are_max_min_fair, FirstComeFirstServed),
    (laws.law_shares_are_max_min_fair, OneWire),
    (laws.law_what_is_asked_for_is_carried, LosesWork),
    (laws.law_two_into_one_take_twice_as_long, GivesEveryoneAll),
    (laws.law_disjoint_pairs_do_not_disturb_each_other, OneWire),
    (laws.law_disjoint_pairs_do_not_disturb_each_other, HalfDuplex),
)


def _changed(
    original: Callable[..., Trace], lane: str, change: Callable[[Span], Span]
) -> Callable[..., Trace]:
    """A simulator in whose traces the spans of a lane are changed."""

    def changes(*args: Any, **settings: Any) -> Trace:
        trace = original(*args, **settings)
        return Trace.of(change(span) if span.lane == lane else span for span in trace.spans)

    changes.__name__ = change.__name__.strip("_")
    return changes


_calls = itertools.count(1)


def _later(span: Span, by_s: float) -> Span:
    return replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s)


def _at_once(span: Span) -> Span:
    return replace(span, start_s=0.0, end_s=span.duration_s)


def _rank_1_is_late(span: Span) -> Span:
    return _later(span, 1e-3) if span.rank == 1 else span


def _leaves_early(span: Span) -> Span:
    return replace(span, end_s=span.end_s - 1e-3) if span.rank == 1 else span


def _sends_a_byte_too_many(span: Span) -> Span:
    return replace(span, size_bytes=span.size_bytes + 1)


def _takes_no_time(span: Span) -> Span:
    return replace(span, end_s=span.start_s)


def _takes_longer_each_time(span: Span) -> Span:
    return _later(span, next(_calls) * 1e-6)


_in_exchanges = partial(_changed, simulate_exchange, "communication")

EXCHANGE_BITES = (
    (laws.law_bytes_are_the_exchanges, _in_exchanges(_sends_a_byte_too_many)),
    (laws.law_links_carry_no_more_than_their_rate, _in_exchanges(_takes_no_time)),
    (laws.law_a_text_does_one_thing_after_the_other, _in_exchanges(_at_once)),
    (laws.law_same_exchange_same_trace, _in_exchanges(_takes_longer_each_time)),
)


def ignores_the_seed(*args: Any, seed: int = 0, **settings: Any) -> Trace:
    return simulate(*args, **settings)


def draws_anew(*args: Any, seed: int = 0, **settings: Any) -> Trace:
    return simulate(*args, seed=next(_calls), **settings)


def prices_every_exchange_as_dense(
    plan: Any, profile: Any, cluster: Any, ranks: str = "one", **settings: Any
) -> Trace:
    """On the representative rank."""
    if ranks == "one":
        messages = tuple(m.model_copy(update={"exchange": "dense"}) for m in plan.messages)
        plan = plan.model_copy(update={"messages": messages})
    return simulate(plan, profile, cluster, ranks=ranks, **settings)  # type: ignore[arg-type]


DENSE_BITES = (
    (laws.law_every_rank_is_the_one, _changed(simulate, "communication", _rank_1_is_late)),
    (laws.law_the_seed_decides, ignores_the_seed),
    (laws.law_the_seed_decides, draws_anew),
    (laws.law_all_wait_for_the_slowest, _changed(simulate, "communication", _leaves_early)),
)

PLAN_BITES = (
    (laws.law_one_rank_stands_for_all, prices_every_exchange_as_dense),
    (laws.law_a_rank_computes_one_thing_at_a_time, _changed(simulate, "compute", _at_once)),
)
