"""Networks and simulators keep their laws; wrong ones are rejected.

For hosts of several ranks planners predict what the simulator says;
``test_simulated_plans_keep_every_law`` asks the same of ranks that are alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.ring import ring
from gradwire.compress.none import none
from gradwire.contract import Exchange
from gradwire.contract.registry import examples
from gradwire.contract.trace.span import Span, Trace
from gradwire.exchange.by_name import by_name
from gradwire.exchange.error_feedback import ErrorFeedback, feedback_refusal
from gradwire.exchange.pair import Pair, pair
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import DENSE, ExchangeSetting, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.network import Flow, Network
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.laws.planners import Planner
from gradwire_lab.laws.tolerance import must
from gradwire_lab.planner.bytescheduler import bytescheduler
from gradwire_lab.planning.sparse_fusion import NOTHING
from papers.one_exchange import simulate_exchange
from tests.each import each
from tests.laws import sim_laws as laws
from tests.laws.cases import (
    kind_of,
    name_of,
    own_exchanges,
    pairs,
    places_of_each_path,
    planners,
)
from tests.laws.sim_laws import (
    DENSE_LAWS,
    EXCHANGE_LAWS,
    NETWORK_LAWS,
    PLAN_LAWS,
    SLACK,
    TOLERANCE,
    Simulator,
    Transfer,
    law_same_exchange_same_trace,
)
from tests.laws.variable import above
from tests.planning.profiles import measured, profiles
from tests.strategies import bounded

# ---- deliberately wrong ones ---------------------------------------------------------


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

    def transfer(
        self, src: int, dst: int, work_s: float, done: Callable[[], None]
    ) -> Flow:
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
        return Trace.of(
            change(span) if span.lane == lane else span for span in trace.spans
        )

    changes.__name__ = change.__name__.strip("_")
    return changes


_calls = itertools.count(1)


def _later(span: Span, by_s: float) -> Span:
    return replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s)


def _at_once(span: Span) -> Span:
    return replace(span, start_s=0.0, end_s=span.duration_s)


def _rank_1_is_late(span: Span) -> Span:
    return _later(span, 1e-3) if span.rank == 1 else span


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


def prices_every_exchange_as_dense(
    plan: Any, profile: Any, cluster: Any, ranks: str = "one", **settings: Any
) -> Trace:
    """On the representative rank."""
    if ranks == "one":
        messages = tuple(
            m.model_copy(update={"exchange": "dense"}) for m in plan.messages
        )
        plan = plan.model_copy(update={"messages": messages})
    return simulate(plan, profile, cluster, ranks=ranks, **settings)  # type: ignore[arg-type]


DENSE_BITES = (
    (
        laws.law_every_rank_is_the_one,
        _changed(simulate, "communication", _rank_1_is_late),
    ),
)

PLAN_BITES = (
    (laws.law_one_rank_stands_for_all, prices_every_exchange_as_dense),
    (
        laws.law_a_rank_computes_one_thing_at_a_time,
        _changed(simulate, "compute", _at_once),
    ),
)


# ---- tests ---------------------------------------------------------------------------

several = st.builds(
    Cluster,
    num_ranks=st.sampled_from((2, 3, 5)),
    rate_bytes_per_s=st.floats(1e4, 1e8),
    hop_s=st.one_of(st.just(0.0), st.floats(1e-6, 1e-3)),
)
ranks = st.integers(0, 4)
transfers = st.lists(
    st.builds(
        Transfer,
        st.floats(0.0, 3.0).map(lambda x: round(x, 1)),
        ranks,
        ranks,
        st.floats(0.0, 2.0).map(lambda x: round(x, 1)),
    ),
    min_size=1,
    max_size=8,
)
CROWD = [
    Transfer(0.0, 0, 1, 1.0),
    Transfer(0.0, 0, 2, 1.0),
    Transfer(0.0, 0, 3, 1.5),
    Transfer(0.5, 4, 3, 2.0),
    Transfer(0.5, 4, 4, 1.0),
    Transfer(1.0, 2, 0, 1.0),
]

LINE = LineFit(alpha_s=1e-5, per_unit_s=1e-8)
MEASURED = CodecFit(encode=LINE, decode=LINE, merge=LINE)
PROFILE = profile_of(
    ([64, 900], 0.002, 0.001),
    ([], 0.001, 0.001),
    ([3000], 0.001, 0.002),
    ([400], 0.001, 0.002),
)
CLUSTER = Cluster(
    num_ranks=3, rate_bytes_per_s=1e6, hop_s=1e-4, codecs={"topk": MEASURED}
)


@each("law", NETWORK_LAWS, ids=lambda law: law.__name__)
def test_the_network_keeps_every_law(law: Callable[..., None]) -> None:
    @bounded(60)
    @given(drawn=transfers)
    def holds(drawn: list[Transfer]) -> None:
        law(Network, drawn)

    law(Network, CROWD)
    holds()


@each("law, make", NETWORK_BITES, ids=lambda p: p.__name__)
def test_network_law_bites(law: Callable[..., None], make: type[Network]) -> None:
    with pytest.raises(AssertionError):
        law(make, CROWD)


VARIABLE = (pair(above(), allgather_sparse()), pair(above(), casync_ps()))


def simulated_once() -> Simulator:
    """The simulator, for laws that look at one and the same trace of an exchange."""
    known: dict[str, Trace] = {}

    def simulate_once(
        exchange: Exchange, numel: int, cluster: Cluster, **shapes: Any
    ) -> Trace:
        case = repr((exchange, numel, cluster))
        if case not in known:
            known[case] = simulate_exchange(exchange, numel, cluster, **shapes)
        return known[case]

    return simulate_once


ALL = (*pairs(), *own_exchanges())
FULL = places_of_each_path(ALL)
KINDS = {kind_of(made): made for made in ALL}.values()
FEW_KINDS = {kind_of(made)[at]: made for at in (0, -1) for made in KINDS}.values()
"""One with each algorithm, and one with each collective."""


@each("exchange", [*(ALL[place] for place in FULL), *VARIABLE], ids=name_of)
def test_simulated_exchanges_keep_every_law(exchange: Exchange) -> None:
    @bounded(2)
    @given(numel=st.sampled_from((0, 1, 9, 64, 1000)), cluster=several)
    def hold(numel: int, cluster: Cluster) -> None:
        once = simulated_once()
        for law in EXCHANGE_LAWS:
            asked = simulate_exchange if law is law_same_exchange_same_trace else once
            law(asked, exchange, numel, cluster)
            law(asked, ErrorFeedback(exchange), numel, cluster)

    hold()


@each("law, wrong", EXCHANGE_BITES, ids=lambda p: p.__name__)
def test_exchange_law_bites(
    law: Callable[..., None], wrong: Callable[..., Any]
) -> None:
    several_steps = pair(none(), ring())
    law(simulate_exchange, several_steps, 64, CLUSTER)
    with pytest.raises(AssertionError):
        law(wrong, several_steps, 64, CLUSTER)


@pytest.mark.parametrize("planner", planners(), ids=name_of)
def test_simulated_plans_keep_every_law(planner: Planner) -> None:
    @bounded(2)
    @given(profile=profiles(largest=300), cluster=several)
    def hold(profile: Profile, cluster: Cluster) -> None:
        plan = planner(profile, measured(cluster))
        for law in DENSE_LAWS[: _is_dense(plan)]:
            law(simulate, plan, profile, cluster)
        for law in PLAN_LAWS:
            law(simulate, plan, profile, cluster)

    plan = planner(PROFILE, measured(CLUSTER))
    for law in DENSE_LAWS if _is_dense(plan) else ():
        law(simulate, plan, PROFILE, CLUSTER)
    hold()


def _is_dense(plan: Plan) -> bool:
    return all(message.exchange == DENSE for message in plan.messages)


def _algorithm(exchange: Exchange) -> str:
    """The file of ``compress/`` that an exchange is made of, or is."""
    return type(exchange.codec if isinstance(exchange, Pair) else exchange).__name__


def _through(exchange: Exchange, plan: Plan, *, every: int = 1) -> Plan:
    """The plan with every so-many-eth message going through an exchange of these
    files.
    """
    collective = (
        type(exchange.collective).__name__ if isinstance(exchange, Pair) else None
    )
    plain = by_name(_algorithm(exchange), {}, collective)
    setting = ExchangeSetting(
        compressor=_algorithm(exchange),
        collective=collective,
        error_feedback=feedback_refusal(plain) is None,
    )
    messages = [
        message.model_copy(update={"exchange": "other"})
        if number % every == 0
        else message
        for number, message in enumerate(plan.messages)
    ]
    return plan.model_copy(
        update={"messages": tuple(messages), "exchanges": {"other": setting}}
    )


def law_of_plans_through(
    exchange: Exchange,
    profile: Profile,
    cluster: Cluster,
    credit: int,
    every: int,
    measured: bool,
) -> None:
    plan = bytescheduler(profile, cluster, partition_bytes=2000, credit=credit)
    if exchange.declared.whole_tensors:  # then nothing may be cut
        plan = wfbp(profile, cluster).model_copy(update={"credit": credit})
    codecs = {_algorithm(exchange): MEASURED} if measured else {}
    cluster = cluster.model_copy(update={"codecs": codecs})
    for law in PLAN_LAWS:
        law(simulate, _through(exchange, plan, every=every), profile, cluster)


@pytest.mark.parametrize("exchange", FEW_KINDS, ids=name_of)
def test_simulated_plans_of_other_exchanges_keep_every_law(exchange: Exchange) -> None:
    """Of one of each kind: plans name no settings here. Its name says in which
    circumstances.
    """
    place = crc32(name_of(exchange).encode())
    # Among other numbers sparcml's first ranks wait for the last, which leaves room on
    # links: one rank that stands for all then takes up to 29 % longer, with several
    # messages at once.
    ranks = (2, 4, 8) if "sparcml" in name_of(exchange) else (2, 3, 5)
    law_of_plans_through(
        exchange,
        PROFILE,
        CLUSTER.model_copy(update={"num_ranks": ranks[place % 3]}),
        credit=1 + place % 4,
        every=1 + place % 2,
        measured=place % 4 < 2,
    )


@each("law, wrong", DENSE_BITES, ids=lambda p: p.__name__)
def test_dense_law_bites(law: Callable[..., None], wrong: Callable[..., Any]) -> None:
    plan = bytescheduler(PROFILE, CLUSTER, partition_bytes=2000, credit=1)
    law(simulate, plan, PROFILE, CLUSTER)
    with pytest.raises(AssertionError):
        law(wrong, plan, PROFILE, CLUSTER)


@each("law, wrong", PLAN_BITES, ids=lambda p: p.__name__)
def test_plan_law_bites(law: Callable[..., None], wrong: Callable[..., Any]) -> None:
    sparse = next(p for p in pairs() if type(p.codec).__name__ in CLUSTER.codecs)
    plan = _through(
        sparse, bytescheduler(PROFILE, CLUSTER, partition_bytes=2000, credit=1)
    )
    law(simulate, plan, PROFILE, CLUSTER)
    with pytest.raises(AssertionError):
        law(wrong, plan, PROFILE, CLUSTER)


def test_every_law_has_a_specimen() -> None:
    for tried, bites in (
        (NETWORK_LAWS, NETWORK_BITES),
        (EXCHANGE_LAWS, EXCHANGE_BITES),
        (DENSE_LAWS, DENSE_BITES),
        (PLAN_LAWS, PLAN_BITES),
    ):
        assert {law for law, _ in bites} == set(tried)


# ---- predictions ---------------------------------------------------------------------

Predict = Callable[[Plan, Profile, Cluster], float]

SLOW = Cluster(num_ranks=2, rate_bytes_per_s=1e6, hop_s=1e-4)


def law_predicted_is_simulated(
    predict: Predict, plan: Plan, profile: Profile, cluster: Cluster
) -> None:
    """To the last bit for a rank that stands for all. On all ranks to rounding where
    all is dense, and else as near as ranks are that begin an exchange together. Among
    them are messages that are within a host at once.
    """
    predicted_s = predict(plan, profile, cluster)
    one_s = simulate(plan, profile, cluster).iteration_s
    must(
        predicted_s == one_s,
        f"{predicted_s} s were predicted, and one rank takes {one_s} s",
    )
    all_s = simulate(plan, profile, cluster, ranks="all").iteration_s
    is_dense = all(message.exchange == DENSE for message in plan.messages)
    is_alone = plan.credit == 1 or cluster.ranks_per_host == 1
    allowed = SLACK if is_dense and is_alone else TOLERANCE
    must(
        abs(predicted_s - all_s) <= allowed * all_s,
        f"{predicted_s} s, all ranks take {all_s} s",
    )


HOSTS = {
    per_host: SLOW.model_copy(
        update={
            "num_ranks": num_ranks,
            "host": Host(num_ranks=per_host, rate_bytes_per_s=1e8, hop_s=1e-5),
        }
    )
    for per_host, num_ranks in ((2, 6), (4, 8))
}
"""Clusters whose hosts have several ranks; these divide the messages of ``PROFILE``."""


@pytest.mark.parametrize("planner", planners(), ids=name_of)
def test_predicted_is_simulated_on_hosts(planner: Planner) -> None:
    cluster = measured(HOSTS[2 + 2 * (crc32(name_of(planner).encode()) % 2)])
    plan = planner(PROFILE, cluster)
    law_predicted_is_simulated(iteration_s, plan, PROFILE, cluster)
    # Hosts encode their sums, so nothing is encoded before a message is launched.
    assert not any(message.inline or message.early for message in plan.messages)
    other = planner(PROFILE, cluster.model_copy(update={"host": None}))
    if any(message.inline or message.early for message in other.messages):
        timing = run_on_clock(other, PROFILE, cluster)
        assert (list(timing.inline), timing.early_s) == ([], 0)


FREE = dict.fromkeys(
    ("dgc", "topk", "onebit", "int8", "powersgd"),
    CodecFit(encode=NOTHING, decode=NOTHING, merge=NOTHING),
)


@pytest.mark.parametrize(
    "planner",
    [
        one
        for one in examples("planner")
        if not any(word in name_of(one) for word in ("bytes", "ssfusion"))
    ],
    ids=name_of,
)
def test_hosts_are_ranks_of_thinner_links_and_shorter_tensors(planner: Planner) -> None:
    """Where nothing costs time within a host: an L-th of the elements, and of the link
    for each.

    Not for planners that keep tensors whole, nor for settings that count bytes.
    """
    rows = [
        ([64, 912], 0.002, 0.001),
        ([], 0.001, 0.001),
        ([3200, 80_000], 0.001, 0.002),
    ]
    host = Host(num_ranks=2, rate_bytes_per_s=1e18)
    hosts = Cluster(
        num_ranks=8, rate_bytes_per_s=1e7, hop_s=1e-4, host=host, codecs=FREE
    )
    thin = Cluster(num_ranks=4, rate_bytes_per_s=5e6, hop_s=1e-4, codecs=FREE)
    whole, short = (
        profile_of(*[([n // share for n in numels], *times) for numels, *times in rows])
        for share in (1, 2)
    )
    thin_s = iteration_s(planner(short, thin), short, thin)
    assert iteration_s(planner(whole, hosts), whole, hosts) == pytest.approx(
        thin_s, rel=1e-9
    )


def forgets_latency(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    return iteration_s(plan, profile, cluster.model_copy(update={"hop_s": 0.0}))


def sends_all_at_once(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    return iteration_s(plan.model_copy(update={"credit": 9}), profile, cluster)


def forgets_the_next_forward(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    return run_on_clock(plan, profile, cluster).message_end_s[-1]


@pytest.mark.parametrize(
    "wrong", [forgets_latency, sends_all_at_once, forgets_the_next_forward], ids=name_of
)
def test_the_law_bites(wrong: Predict) -> None:
    cluster = SLOW.model_copy(update={"num_ranks": 3})
    plan = wfbp(PROFILE, cluster)
    law_predicted_is_simulated(iteration_s, plan, PROFILE, cluster)
    with pytest.raises(AssertionError):
        law_predicted_is_simulated(wrong, plan, PROFILE, cluster)
