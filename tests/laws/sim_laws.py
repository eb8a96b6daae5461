"""The laws of the simulator: of networks, of one exchange's trace, of plans on all
ranks.

Laws of networks take what makes one, the others a simulator; so each can be shown a
wrong one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from gradwire.contract import Exchange
from gradwire.contract.spec import TensorSpec, squarest
from gradwire.contract.trace.span import Span, Trace
from gradwire.exchange.without_data import expected_bytes
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.closed_form import NEVER
from gradwire.planning.simulation.network import Flow, Network

SLACK = 1e-9
"""Relative; times are sums of a few hundred floats."""

TOLERANCE = 0.05
"""How far a plan whose exchanges are no closed form may take another time on the
representative rank than on all ranks, as a share of the iteration, with several
messages at once. With one at a time there is no difference but rounding.
"""

Networks = Callable[[], Network]
Watch = Callable[[float, Network, list[Flow]], None]
Simulator = Callable[..., Trace]


class Transfer(NamedTuple):
    """A transfer between two ranks, or, where they are one and the same, a
    collective.
    """

    start_s: float
    src: int
    dst: int
    work_s: float


def played(
    network: Network, transfers: Sequence[Transfer], watch: Watch | None = None
) -> list[float]:
    """When each transfer ends; ``watch`` is called whenever something started or
    ended.
    """
    ends_s = [NEVER] * len(transfers)
    coming = sorted(
        range(len(transfers)), key=lambda i: transfers[i].start_s, reverse=True
    )
    under_way: dict[int, Flow] = {}
    clock = [0.0]

    def end(number: int) -> None:
        ends_s[number] = clock[0]
        del under_way[number]

    while True:
        start_s = transfers[coming[-1]].start_s if coming else NEVER
        clock[0] = min(start_s, network.next_end_s())
        if clock[0] == NEVER:
            return ends_s
        network.advance(clock[0])
        while coming and transfers[coming[-1]].start_s <= clock[0]:
            number = coming.pop()
            _, src, dst, work_s = transfers[number]
            done = partial(end, number)
            is_joint = src == dst
            under_way[number] = (
                network.collective(work_s, done)
                if is_joint
                else network.transfer(src, dst, work_s, done)
            )
        if watch is not None:
            watch(clock[0], network, list(under_way.values()))


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= SLACK * max(1.0, abs(one), abs(other))


def _sides(drawn: Iterable[Transfer]) -> list[int]:
    ranks = sorted({rank for one in drawn for rank in (one.src, one.dst)})
    return [side for rank in ranks for side in (rank, ~rank)]


def _rates(network: Network, flows: list[Flow], side: int) -> list[float]:
    """Of what uses a side; collectives use all."""
    network.next_end_s()  # which shares links out anew
    return [flow.share for flow in flows if not flow.sides or side in flow.sides]


def law_alone_a_transfer_has_the_whole_link(
    make: Networks, drawn: Sequence[Transfer]
) -> None:
    for one in drawn:
        (end_s,) = played(make(), [one])
        assert _near(end_s, one.start_s + one.work_s), f"{one} ends at {end_s}"


def law_no_side_above_100_percent(make: Networks, drawn: Sequence[Transfer]) -> None:
    def watch(now_s: float, network: Network, flows: list[Flow]) -> None:
        for side in _sides(drawn):
            used = sum(_rates(network, flows, side))
            assert used <= 1 + SLACK, f"side {side} carries {used:.0%} at {now_s}"

    played(make(), drawn, watch)


def law_shares_are_max_min_fair(make: Networks, drawn: Sequence[Transfer]) -> None:
    """Every flow has a full side on which nobody has more than it: its bottleneck."""

    def watch(now_s: float, network: Network, flows: list[Flow]) -> None:
        of_side = {side: _rates(network, flows, side) for side in _sides(drawn)}
        for flow in flows:
            rate = flow.share
            assert any(
                sum(of_side[side]) >= 1 - SLACK and rate >= max(of_side[side]) - SLACK
                for side in flow.sides or of_side
            ), f"a flow has {rate:.3f} of a link at {now_s} and could have more"

    played(make(), drawn, watch)


def law_what_is_asked_for_is_carried(make: Networks, drawn: Sequence[Transfer]) -> None:
    """Rates times seconds add up to the work, and everything ends."""
    rates: dict[Flow, float] = {}
    carried_s: list[float] = []
    last_s = [0.0]

    def watch(now_s: float, network: Network, flows: list[Flow]) -> None:
        carried_s.append(sum(rates.values()) * (now_s - last_s[0]))
        last_s[0] = now_s
        rates.clear()
        network.next_end_s()  # which shares links out anew
        rates.update((flow, flow.share) for flow in flows)

    assert NEVER not in played(make(), drawn, watch), "a transfer never ends"
    asked_s = sum(one.work_s for one in drawn)
    assert _near(sum(carried_s), asked_s), (
        f"{sum(carried_s)} s of {asked_s} s were carried"
    )


def law_two_into_one_take_twice_as_long(
    make: Networks, drawn: Sequence[Transfer]
) -> None:
    for one, other, target in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        for ends in (
            ((one, target), (other, target)),
            ((target, one), (target, other)),
        ):
            both = [Transfer(0.5, src, dst, 1.0) for src, dst in ends]
            assert played(make(), both) == [2.5, 2.5], f"{ends} at once"


def law_disjoint_pairs_do_not_disturb_each_other(
    make: Networks, drawn: Sequence[Transfer]
) -> None:
    """Nor do the two directions of one pair: links are full duplex."""
    for pairs in (((0, 1), (2, 3)), ((0, 1), (1, 0)), ((0, 1), (1, 2), (2, 0))):
        many = [Transfer(0.0, src, dst, 1.0 + i) for i, (src, dst) in enumerate(pairs)]
        assert played(make(), many) == [one.work_s for one in many], f"{pairs} at once"


NETWORK_LAWS = (
    law_alone_a_transfer_has_the_whole_link,
    law_no_side_above_100_percent,
    law_shares_are_max_min_fair,
    law_what_is_asked_for_is_carried,
    law_two_into_one_take_twice_as_long,
    law_disjoint_pairs_do_not_disturb_each_other,
)


def _by_rank(trace: Trace, lane: str) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        if span.lane == lane:
            found[span.rank].append(span)
    return found


def _shapes(exchange: Exchange, numel: int) -> tuple[tuple[int, ...], ...]:
    """What an exchange is given that acts on tensors in their shapes."""
    return squarest(numel) if exchange.declared.whole_tensors else ()


def _trace(
    simulate: Simulator, exchange: Exchange, numel: int, cluster: Cluster
) -> Trace:
    return simulate(exchange, numel, cluster, shapes=_shapes(exchange, numel))


def law_bytes_are_the_exchanges(
    simulate: Simulator, exchange: Exchange, numel: int, cluster: Cluster
) -> None:
    """Where ranks take turns to broadcast, that is one step's, and stated is a rank's
    average.
    """
    spans = _by_rank(_trace(simulate, exchange, numel, cluster), "communication")
    sent = [
        sum(span.size_bytes for span in spans[rank])
        for rank in range(cluster.num_ranks)
    ]
    spec = TensorSpec("", numel, shapes=_shapes(exchange, numel))
    stated = expected_bytes(exchange, spec, cluster.num_ranks)
    assert stated is not None
    if any("Broadcast" in span.name for span in spans[0]):
        assert 0 <= sum(sent) - sum(stated) < cluster.num_ranks, f"{sent}, not {stated}"
    else:
        assert sent == stated


def law_links_carry_no_more_than_their_rate(
    simulate: Simulator, exchange: Exchange, numel: int, cluster: Cluster
) -> None:
    """In no stretch of time does a rank send more than its link carries in it."""
    for own in _by_rank(
        _trace(simulate, exchange, numel, cluster), "communication"
    ).values():
        for i, first in enumerate(own):
            sent = 0
            for span in own[i:]:
                sent += span.size_bytes
                could = cluster.rate_bytes_per_s * (span.end_s - first.start_s)
                assert sent <= could * (1 + SLACK) + SLACK, (
                    f"{sent} bytes where {could} can go"
                )


def law_a_text_does_one_thing_after_the_other(
    simulate: Simulator, exchange: Exchange, numel: int, cluster: Cluster
) -> None:
    for lane in ("compute", "communication"):
        for own in _by_rank(_trace(simulate, exchange, numel, cluster), lane).values():
            for before, after in pairwise(own):
                assert after.start_s >= before.end_s


def law_same_exchange_same_trace(
    simulate: Simulator, exchange: Exchange, numel: int, cluster: Cluster
) -> None:
    once, again = (_trace(simulate, exchange, numel, cluster) for _ in range(2))
    assert once == again


EXCHANGE_LAWS = (
    law_bytes_are_the_exchanges,
    law_links_carry_no_more_than_their_rate,
    law_a_text_does_one_thing_after_the_other,
    law_same_exchange_same_trace,
)


def law_every_rank_is_the_one(
    simulate: Simulator, plan: Plan, profile: Profile, cluster: Cluster
) -> None:
    """Dense plans: each of all ranks does what the representative does, then."""
    one = sorted(simulate(plan, profile, cluster).spans, key=_what)
    every = simulate(plan, profile, cluster, ranks="all")
    assert {span.rank for span in every.spans} == set(range(cluster.num_ranks))
    for rank in range(cluster.num_ranks):
        own = sorted(
            every.only(lambda span, rank=rank: span.rank == rank).spans, key=_what
        )
        assert [_what(span) for span in own] == [_what(span) for span in one]
        for its, known in zip(own, one, strict=True):
            assert _near(its.start_s, known.start_s), f"rank {rank}: {its}, not {known}"
            assert _near(its.end_s, known.end_s), f"rank {rank}: {its}, not {known}"


def _what(span: Span) -> tuple[str, str, int, int]:
    return span.lane, span.name, span.message, span.size_bytes


def law_one_rank_stands_for_all(
    simulate: Simulator, plan: Plan, profile: Profile, cluster: Cluster
) -> None:
    """To rounding where messages go one by one and nothing is computed. Otherwise an
    exchange is priced alone, from ranks that begin together; behind others, ranks begin
    apart, as parts of a gradient that cannot be cut evenly take them unequally long to
    compute.
    """
    one_s = simulate(plan, profile, cluster).iteration_s
    all_s = simulate(plan, profile, cluster, ranks="all").iteration_s
    is_exact = plan.credit == 1 and not cluster.codecs
    allowed = SLACK if is_exact else TOLERANCE
    assert abs(one_s - all_s) <= allowed * all_s, (
        f"{one_s} s, and {all_s} s on all ranks"
    )


def law_a_rank_computes_one_thing_at_a_time(
    simulate: Simulator, plan: Plan, profile: Profile, cluster: Cluster
) -> None:
    for ranks in ("one", "all"):
        trace = simulate(plan, profile, cluster, ranks=ranks)
        for own in _by_rank(trace, "compute").values():
            for before, after in pairwise(span for span in own if span.duration_s):
                assert after.start_s >= before.end_s - SLACK


DENSE_LAWS = (law_every_rank_is_the_one,)
"""Of plans of dense messages only."""

PLAN_LAWS = (law_one_rank_stands_for_all, law_a_rank_computes_one_thing_at_a_time)
"""Of any plan."""
