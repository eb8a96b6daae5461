"""Every planner, with every example of its settings, keeps every law; wrong plans are
refused.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.contract.registry import examples, load, names
from gradwire.contract.trace.span import Span, Trace
from gradwire.errors import InvalidSetting
from gradwire.planning.data.check import check
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import (
    DENSE,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.auto.candidates import Blend, Candidate
from gradwire.planning.planner.mgwfbp import mgwfbp
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.closed_form import Lane
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws import planners as laws
from gradwire_lab.laws.inputs import MIXED, profile_of
from gradwire_lab.laws.planners import Planner, law_same_facts_same_plan
from gradwire_lab.planner.bytescheduler import bytescheduler
from gradwire_lab.planner.omgs import omgs
from gradwire_lab.planning.sparse_fusion import NOTHING
from tests.each import each
from tests.laws.cases import planners
from tests.planning.profiles import clusters, exact_cluster, measured, profiles
from tests.strategies import bounded

# ---- laws of traces ------------------------------------------------------------------

SLACK = 1e-9
"""Relative; times are sums of a few hundred floats."""


def _messages(plan: Plan, trace: Trace) -> list[Span]:
    """One span for each message, from its first verb for the network to its last."""
    spans: dict[int, Span] = {}
    for span in trace.spans:
        if span.lane == "communication":
            first = spans.get(span.message, replace(span, size_bytes=0))
            spans[span.message] = replace(
                first,
                start_s=min(first.start_s, span.start_s),
                end_s=max(first.end_s, span.end_s),
                size_bytes=first.size_bytes + span.size_bytes,
            )
    assert sorted(spans) == list(range(len(plan.messages))), "a message never left"
    return [spans[number] for number in range(len(plan.messages))]


class Alone(NamedTuple):
    """What a dense message costs by itself, and the bytes that a rank sends."""

    latency_s: float
    work_s: float
    sent_bytes: int


def _alone(plan: Plan, profile: Profile, cluster: Cluster, number: int) -> Alone:
    """Of 32 bits and more an all-reduce; of 16 bits chunks to each, and sums to all."""
    tensors = {t.name: t for la in profile.layers for t in la.tensors}
    chunks = plan.messages[number].chunks
    dtype = getattr(torch, tensors[chunks[0].tensor].dtype)
    numel = sum(chunk.numel for chunk in chunks)
    world = cluster.num_ranks
    if dtype.itemsize > 2 or world == 1:
        size_bytes = numel * dtype.itemsize
        latency_s, work_s = cluster.parts_s("all_reduce", size_bytes)
        return Alone(latency_s, work_s, 2 * (world - 1) * size_bytes // world)
    chunk_bytes = -(-numel // world) * dtype.itemsize
    assert chunk_bytes <= 2**16, "larger ones go by sends"
    pushed = cluster.parts_s("all_to_all", world * chunk_bytes)
    pulled = cluster.parts_s("all_gather", chunk_bytes)
    latency_s, work_s = map(sum, zip(pushed, pulled, strict=True))
    return Alone(latency_s, work_s, 2 * (world - 1) * chunk_bytes)


def _lane(trace: Trace, lane: str) -> dict[str, Span]:
    return {span.name: span for span in trace.spans if span.lane == lane}


def _owners(profile: Profile) -> dict[str, str]:
    return {
        tensor.name: layer.name for layer in profile.layers for tensor in layer.tensors
    }


def law_messages_wait_for_gradients(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    backward, owners = _lane(trace, "backward"), _owners(profile)
    for span in _messages(plan, trace):
        for chunk in plan.messages[span.message].chunks:
            assert span.start_s >= backward[owners[chunk.tensor]].end_s


def law_messages_start_in_issue_order(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    starts = [span.start_s for span in _messages(plan, trace)]
    assert starts == sorted(starts)


def law_lanes_carry_one_message_at_a_time(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    """Message i travels on lane i mod credit, behind message i - credit."""
    spans = _messages(plan, trace)
    for before, after in zip(spans, spans[plan.credit :], strict=False):
        assert after.start_s >= before.end_s, (
            f"two messages on lane {after.message % plan.credit}"
        )


def law_messages_wait_for_those_they_name(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    spans = _messages(plan, trace)
    for number, message in enumerate(plan.messages):
        for other in message.after:
            assert spans[number].start_s >= spans[other].end_s


def law_no_message_waits_for_nothing(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    """It starts as soon as all that it waits for is there."""
    backward, owners = _lane(trace, "backward"), _owners(profile)
    spans = _messages(plan, trace)
    for number, (span, message) in enumerate(zip(spans, plan.messages, strict=True)):
        causes = [backward[owners[chunk.tensor]].end_s for chunk in message.chunks]
        causes += [spans[other].end_s for other in message.after]
        causes += [spans[number - 1].start_s] if number else []
        causes += [spans[number - plan.credit].end_s] if number >= plan.credit else []
        assert span.start_s == max(causes), (
            f"message {number} could start at {max(causes)}"
        )


def law_no_link_above_100_percent(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    """In no stretch of time are more bytes carried whole than the link carries in
    it.
    """
    by_end = sorted(_messages(plan, trace), key=lambda span: span.end_s)
    for one in by_end:
        work_s = 0.0
        for span in by_end:
            if span.start_s >= one.start_s:
                work_s += _alone(plan, profile, cluster, span.message).work_s
                assert work_s <= (span.end_s - one.start_s) * (1 + SLACK) + SLACK


def law_each_message_takes_its_time(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    for span in _messages(plan, trace):
        alone = _alone(plan, profile, cluster, span.message)
        alone_s = alone.latency_s + alone.work_s
        assert span.duration_s >= alone_s * (1 - SLACK) - SLACK
        if plan.credit == 1:
            assert span.duration_s <= alone_s * (1 + SLACK) + SLACK


def law_forward_waits_for_its_messages(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    forward, owners = _lane(trace, "forward"), _owners(profile)
    for span in _messages(plan, trace):
        for chunk in plan.messages[span.message].chunks:
            first = (
                owners[chunk.tensor] if plan.overlap_forward else profile.layers[0].name
            )
            assert forward[first].start_s >= span.end_s


def law_layers_run_one_behind_the_other(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    names = [layer.name for layer in profile.layers]
    lanes = [_lane(trace, "backward")[name] for name in reversed(names)]
    lanes += [_lane(trace, "forward")[name] for name in names]
    seconds = [layer.backward_s for layer in reversed(profile.layers)]
    seconds += [layer.forward_s for layer in profile.layers]
    for span, took_s in zip(lanes, seconds, strict=True):
        assert abs(span.duration_s - took_s) <= SLACK
    for before, after in itertools.pairwise(lanes):
        assert after.start_s >= before.end_s


def law_bytes_are_the_rings(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    """Those of 16-bit values are of equal chunks, the last of which is filled up."""
    for span in _messages(plan, trace):
        sent_bytes = _alone(plan, profile, cluster, span.message).sent_bytes
        assert span.size_bytes == sent_bytes


def law_price_is_the_traces(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    """To the last bit for the representative rank, to rounding for one of all ranks."""
    price_s = iteration_s(plan, profile, cluster)
    assert abs(price_s - trace.iteration_s) <= SLACK * price_s


DENSE_LAWS = (
    law_no_message_waits_for_nothing,
    law_no_link_above_100_percent,
    law_each_message_takes_its_time,
    law_bytes_are_the_rings,
)
"""Of plans whose messages are plain gradients: nothing is computed for them."""

TRACE_LAWS = (
    law_messages_wait_for_gradients,
    law_messages_start_in_issue_order,
    law_lanes_carry_one_message_at_a_time,
    law_messages_wait_for_those_they_name,
    law_forward_waits_for_its_messages,
    law_layers_run_one_behind_the_other,
    law_price_is_the_traces,
    *DENSE_LAWS,
)


def laws_of(plan: Plan, cluster: Cluster) -> tuple[Callable[..., None], ...]:
    """The laws that a plan's traces on a cluster keep."""
    if all(message.exchange == DENSE for message in plan.messages):
        return TRACE_LAWS
    if cluster.num_ranks == 1:  # other exchanges send nothing then
        return (law_layers_run_one_behind_the_other, law_price_is_the_traces)
    others = tuple(law for law in TRACE_LAWS if law not in DENSE_LAWS)
    if plan.credit == 1:
        return others
    # On another channel a message may be encoded, and start, before the one ahead of
    # it.
    return tuple(law for law in others if law is not law_messages_start_in_issue_order)


# ---- deliberately wrong ones ---------------------------------------------------------


def _with(plan: Plan, **changed: Any) -> Plan:
    return plan.model_copy(update=changed)


def _first(plan: Plan, *chunks: Chunk, exchange: str = "dense") -> Plan:
    """The plan with other chunks in its first message."""
    message = PlannedMessage(chunks=chunks, exchange=exchange)
    return _with(plan, messages=(message, *plan.messages[1:]))


def _chunk(plan: Plan, **changed: Any) -> Chunk:
    return plan.messages[0].chunks[0].model_copy(update=changed)


def lost_block(plan: Plan) -> Plan:
    return _with(plan, messages=plan.messages[1:])


def lost_tail(plan: Plan) -> Plan:
    """As a partitioner that drops the rows left over."""
    return _first(plan, _chunk(plan, stop=_chunk(plan).stop - 1))


def lost_middle(plan: Plan) -> Plan:
    stop = _chunk(plan).stop
    return _first(plan, _chunk(plan, stop=stop // 2), _chunk(plan, start=stop // 2 + 1))


def doubled_block(plan: Plan) -> Plan:
    return _with(plan, messages=(*plan.messages, plan.messages[0]))


def doubled_range(plan: Plan) -> Plan:
    stop = _chunk(plan).stop
    return _first(plan, _chunk(plan, stop=stop // 2), _chunk(plan, start=stop // 2 - 1))


def unknown_tensor(plan: Plan) -> Plan:
    return _first(plan, _chunk(plan, tensor="no.such"))


def beyond_the_end(plan: Plan) -> Plan:
    return _first(plan, _chunk(plan, stop=_chunk(plan).stop + 1))


def before_the_start(plan: Plan) -> Plan:
    return _first(plan, _chunk(plan, start=-1))


def empty_range(plan: Plan) -> Plan:
    return _first(plan, *plan.messages[0].chunks, _chunk(plan, stop=0))


def empty_message(plan: Plan) -> Plan:
    return _with(plan, messages=(*plan.messages, PlannedMessage(chunks=())))


def mixed_dtypes(plan: Plan) -> Plan:
    """Everything in one message."""
    every = tuple(chunk for message in plan.messages for chunk in message.chunks)
    return _with(plan, messages=(PlannedMessage(chunks=every),))


def no_credit(plan: Plan) -> Plan:
    """An order that no message can ever follow: none may start."""
    return _with(plan, credit=0)


def _after(plan: Plan, waits: dict[int, tuple[int, ...]]) -> Plan:
    messages = list(plan.messages)
    for number, others in waits.items():
        messages[number] = messages[number].model_copy(update={"after": others})
    return _with(plan, messages=tuple(messages))


def waits_in_a_cycle(plan: Plan) -> Plan:
    return _after(plan, {0: (1,), 1: (2,), 2: (0,)})


def waits_on_its_own_lane(plan: Plan) -> Plan:
    """Message 2 follows message 0 there, so either waits for the other whatever lanes
    there are.
    """
    return _with(_after(plan, {0: (2,)}), credit=2)


def waits_for_one_behind(plan: Plan) -> Plan:
    """On another lane, so that nothing is in its way but the line it heads."""
    return _with(_after(plan, {1: (2,)}), credit=3)


def waits_for_itself(plan: Plan) -> Plan:
    return _after(plan, {1: (0, 1)})


def waits_for_none_there_is(plan: Plan) -> Plan:
    return _after(plan, {1: (9,)})


def waits_for_one_before_the_first(plan: Plan) -> Plan:
    return _after(plan, {1: (-1,)})


TOPK = ExchangeSetting(compressor="topk", collective="allgather_sparse")
EACH = ExchangeSetting(compressor="each", settings={"sparsifier": "topk"})


def _encoded(plan: Plan, exchange: ExchangeSetting, **where: tuple[str, ...]) -> Plan:
    """The plan with its first message through an exchange, and encoded somewhere."""
    first = plan.messages[0].model_copy(update={"exchange": "other", **where})
    return _with(
        plan, messages=(first, *plan.messages[1:]), exchanges={"other": exchange}
    )


def encodes_what_is_dense(plan: Plan) -> Plan:
    first = plan.messages[0]
    return _with(
        plan,
        messages=(
            first.model_copy(update={"inline": (first.chunks[0].tensor,)}),
            *plan.messages[1:],
        ),
    )


def encodes_what_is_elsewhere(plan: Plan) -> Plan:
    return _encoded(plan, EACH, early=(plan.messages[1].chunks[0].tensor,))


def encodes_twice(plan: Plan) -> Plan:
    name = plan.messages[0].chunks[0].tensor
    return _encoded(plan, EACH, inline=(name,), early=(name,))


def encodes_a_part_of_one_encode(plan: Plan) -> Plan:
    return _encoded(plan, TOPK, early=(plan.messages[0].chunks[0].tensor,))


def encodes_a_cut_tensor(plan: Plan) -> Plan:
    return _encoded(
        _with(doubled_range(plan), exchanges={}),
        EACH,
        early=(plan.messages[0].chunks[0].tensor,),
    )


def unknown_exchange(plan: Plan) -> Plan:
    return _first(plan, *plan.messages[0].chunks, exchange="sparse")


def dense_defined_again(plan: Plan) -> Plan:
    dense = ExchangeSetting(compressor="topk", collective="allgather_sparse")
    return _with(plan, exchanges={"dense": dense})


def foreign_profile(plan: Plan) -> Plan:
    return _with(plan, model="resnet50")


REFUSED: tuple[tuple[Callable[[Plan], Plan], str], ...] = (
    (lost_block, r"lost elements: '\w+' elements 0:\d+ are in no message"),
    (lost_tail, r"lost elements: '\w+' elements (\d+):\d+ are in no message"),
    (lost_middle, r"lost elements: '\w+' elements \d+:\d+ are in no message"),
    (
        doubled_block,
        r"doubled range: '\w+' elements 0:\d+ are in message 0 and in message \d",
    ),
    (
        doubled_range,
        r"doubled range: '\w+' elements .* are in message 0 and in message 0",
    ),
    (unknown_tensor, "message 0: unknown tensor 'no.such'"),
    (beyond_the_end, r"message 0: range 0:\d+ of '\w+' lies outside its \d+ elements"),
    (before_the_start, r"message 0: range -1:\d+ of '\w+' lies outside"),
    (empty_range, r"message 0: range 0:0 of '\w+' is empty"),
    (empty_message, r"message \d is empty"),
    (mixed_dtypes, "message 0 mixes dtypes: bfloat16, float32"),
    (no_credit, "credit 0 lets no message start"),
    (
        waits_in_a_cycle,
        "order that cannot be met: message 0 waits for message 1, which does not",
    ),
    (
        waits_on_its_own_lane,
        "order that cannot be met: message 0 waits for message 2, which does",
    ),
    (
        waits_for_one_behind,
        "order that cannot be met: message 1 waits for message 2, which does",
    ),
    (
        waits_for_itself,
        "order that cannot be met: message 1 waits for message 1, which does not",
    ),
    (
        waits_for_none_there_is,
        "order that cannot be met: message 1 waits for message 9, which",
    ),
    (
        waits_for_one_before_the_first,
        "cannot be met: message 1 waits for message -1, which does",
    ),
    (encodes_what_is_dense, "is dense, so 't3' is not encoded"),
    (encodes_what_is_elsewhere, "is to be encoded, and is not in the message"),
    (encodes_twice, "is to be encoded twice"),
    (encodes_a_part_of_one_encode, "is encoded as one, so .* cannot be encoded early"),
    (encodes_a_cut_tensor, "is to be encoded by itself, and is cut"),
    (unknown_exchange, "message 0: unknown exchange 'sparse'; there are: dense"),
    (dense_defined_again, "exchange 'dense' is built in"),
    (
        foreign_profile,
        "for 'resnet50' cannot be used: made for model 'resnet50', and the "
        "profile is of",
    ),
)
"""What is wrong, and the words by which ``check`` must call it."""


def loses_blocks(profile: Profile, cluster: Cluster) -> Plan:
    """A planner as the paper's algorithm 1 is printed: what a message had before is
    forgotten.
    """
    return lost_tail(wfbp(profile, cluster))


_calls = itertools.count()


def depends_on_the_call(profile: Profile, cluster: Cluster) -> Plan:
    return _with(wfbp(profile, cluster), settings={"call": next(_calls)})


def holds_what_json_lacks(profile: Profile, cluster: Cluster) -> Plan:
    """Not a number, for which JSON has no word."""
    return _with(wfbp(profile, cluster), settings={"density": float("nan")})


def names_another_model(profile: Profile, cluster: Cluster) -> Plan:
    return foreign_profile(wfbp(profile, cluster))


PLANNER_BITES = (
    (laws.law_every_element_is_sent_once, loses_blocks),
    (laws.law_same_facts_same_plan, depends_on_the_call),
    (laws.law_json_keeps_everything, holds_what_json_lacks),
    (laws.law_plans_for_the_model, names_another_model),
)


def _changed(lane: str, change: Callable[[Span], Span]) -> Callable[[Trace], Trace]:
    """Changes the last span of a lane."""

    def changes(trace: Trace) -> Trace:
        last = [span for span in trace.spans if span.lane == lane][-1]
        return Trace.of(
            [*(span for span in trace.spans if span is not last), change(last)]
        )

    return changes


def _all_at_once(span: Span) -> Span:
    return replace(span, start_s=0.0, end_s=span.duration_s)


def _every_message(change: Callable[[Span], Span]) -> Callable[[Trace], Trace]:
    return lambda trace: Trace.of(
        change(span) if span.lane == "communication" else span for span in trace.spans
    )


TRACE_BITES = (
    (law_messages_wait_for_gradients, _every_message(_all_at_once)),
    (
        law_messages_start_in_issue_order,
        _changed("communication", lambda s: replace(s, start_s=0.0)),
    ),
    (
        law_lanes_carry_one_message_at_a_time,
        _changed("communication", lambda s: replace(s, start_s=0.0)),
    ),
    (
        law_messages_wait_for_those_they_name,
        _changed("communication", lambda s: replace(s, start_s=0.0)),
    ),
    (
        law_no_message_waits_for_nothing,
        _changed("communication", lambda s: replace(s, start_s=s.start_s + 1e-6)),
    ),
    (law_no_link_above_100_percent, _every_message(_all_at_once)),
    (
        law_each_message_takes_its_time,
        _changed("communication", lambda s: replace(s, end_s=s.start_s)),
    ),
    (
        law_forward_waits_for_its_messages,
        _changed("communication", lambda s: replace(s, end_s=s.end_s + 100)),
    ),
    (
        law_layers_run_one_behind_the_other,
        _changed("forward", lambda s: replace(s, start_s=0.0, end_s=s.duration_s)),
    ),
    (
        law_bytes_are_the_rings,
        _changed("communication", lambda s: replace(s, size_bytes=s.size_bytes + 1)),
    ),
    (
        law_price_is_the_traces,
        _changed("forward", lambda s: replace(s, end_s=s.end_s + 1e-6)),
    ),
)


# ---- tests ---------------------------------------------------------------------------

SOUND = profile_of(
    ([64, 9], 0.5, 0.25),
    ([], 0.125, 0.125),
    ([300], 0.25, 0.5),
    ([40], 0.25, 0.5),
    dtypes=MIXED,
)
ALONE = profile_of(([], 0.5, 0.25), ([], 0.0, 0.0))
"""No gradients at all: nothing to send, and no planner may stumble over it."""


def _id(example: Any) -> str:
    if isinstance(example, partial):
        return ",".join(
            [example.func.__name__, *(f"{k}={v}" for k, v in example.keywords.items())]
        )
    return str(example.__name__)


every_planner = pytest.mark.parametrize("planner", planners(), ids=_id)


@every_planner
def test_every_planner_keeps_every_law(planner: Planner) -> None:
    """One plan is held to all laws that look at one; the other asks the planner
    itself.
    """

    def hold(profile: Profile, cluster: Cluster) -> None:
        law_same_facts_same_plan(planner, profile, cluster)
        made = planner(profile, cluster)
        for law in laws.LAWS:
            if law is not law_same_facts_same_plan:
                law(lambda *facts: made, profile, cluster)

    for profile in (SOUND, ALONE):
        hold(profile, measured(exact_cluster()))
    hold(SOUND, measured(HOSTS))
    plan = planner(SOUND, measured(MEASURED))
    assert (
        iteration_s(plan, SOUND, MEASURED)
        == simulate(plan, SOUND, MEASURED).iteration_s
    )
    bounded(4)(given(profile=profiles(), cluster=clusters)(hold))()


@every_planner
def test_traces_of_every_planner_keep_every_law(planner: Planner) -> None:
    @bounded(6)
    @given(profile=profiles(largest=120), cluster=clusters)
    def hold(profile: Profile, cluster: Cluster) -> None:
        plan = planner(profile, cluster)
        trace = simulate(plan, profile, cluster)
        assert trace == simulate(plan, profile, cluster), (
            "the same plan gave another trace"
        )
        assert iteration_s(plan, profile, cluster) == trace.iteration_s
        for law in laws_of(plan, cluster):
            law(plan, profile, cluster, trace)

    hold()


PLAIN = profile_of(
    ([64, 900], 0.002, 0.001),
    ([], 0.001, 0.001),
    ([3000], 0.001, 0.002),
    ([400], 0.001, 0.002),
)
BENT = LineFit(
    alpha_s=1e-4, per_unit_s=1e-7, samples=((64, 2e-4), (2048, 3e-4), (20000, 2e-3))
)
SLOW = Cluster(num_ranks=3, rate_bytes_per_s=1e6, hop_s=1e-4)
MEASURED = SLOW.model_copy(
    update={
        "collectives": dict.fromkeys(("all_reduce", "all_gather"), BENT),
        "host_share": 0.5,
    }
)
"""Of costs that no line fits."""
HOSTS = SLOW.model_copy(
    update={"num_ranks": 8, "host": Host(num_ranks=4, rate_bytes_per_s=1e8, hop_s=1e-5)}
)
"""Of ranks of which several share a link."""


@each("planner, cluster", product([mgwfbp, omgs], [SLOW, MEASURED, HOSTS]))
def test_a_planners_own_link_is_the_simulators(
    planner: Planner, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link that a planner decides by ends with the last message, where nothing is
    merged.
    """
    links: list[Lane] = []

    class Noted(Lane):
        def __init__(self) -> None:
            super().__init__()
            links.append(self)

    monkeypatch.setattr(sys.modules[planner.__module__], "Lane", Noted)
    encode = CodecFit(encode=BENT, decode=NOTHING, merge=NOTHING)
    cluster = cluster.model_copy(update={"codecs": {"dgc": encode}})
    timing = run_on_clock(planner(PLAIN, cluster), PLAIN, cluster)
    assert links[-1].free_s == pytest.approx(timing.message_end_s[-1], rel=1e-12)


HALVES = profile_of(
    ([65, 901], 0.002, 0.001), ([300_001], 0.001, 0.002), dtypes=("bfloat16",)
)


@each("cluster", [SLOW, MEASURED, HOSTS])
def test_dense_messages_of_16_bits_have_the_price_of_their_verbs(
    cluster: Cluster,
) -> None:
    """Measured all-reduces say nothing of them, among hosts as among ranks."""
    plan = wfbp(HALVES, cluster)
    played = simulate(plan, HALVES, cluster, ranks="all")
    assert iteration_s(plan, HALVES, cluster) == pytest.approx(
        played.iteration_s, rel=1e-4
    )
    blend = Blend(HALVES, cluster)
    candidate = Candidate(2, 2, overlap_forward=False)
    exact_s = blend.exact_s(candidate)
    assert blend.seconds(candidate) == pytest.approx(exact_s, rel=0.2)


@bounded(30)
@given(
    profile=profiles(largest=120),
    cluster=clusters.filter(lambda cluster: cluster.num_ranks < 9),
    credit=st.integers(1, 4),
    draw=st.randoms(use_true_random=False),
)
def test_traces_of_any_plan_keep_every_law(
    profile: Profile, cluster: Cluster, credit: int, draw: random.Random
) -> None:
    """Any order, any credit, any dependencies that look back; on one rank and on each
    of all.
    """
    messages = list(bytescheduler(profile, cluster, partition_bytes=96).messages)
    draw.shuffle(messages)
    for number, message in enumerate(messages):
        after = tuple(
            draw.sample(range(number), min(number, draw.choice((0, 0, 1, 2))))
        )
        messages[number] = message.model_copy(update={"after": after})
    plan = wfbp(profile, cluster).model_copy(
        update={"messages": tuple(messages), "credit": credit, "overlap_forward": True}
    )
    every = simulate(plan, profile, cluster, ranks="all")
    traces = [simulate(plan, profile, cluster)]
    traces += [
        every.only(lambda span, rank=rank: span.rank == rank)
        for rank in {0, cluster.num_ranks - 1}
    ]
    is_narrow = any(t.dtype == "bfloat16" for la in profile.layers for t in la.tensors)
    for number, trace in enumerate(traces):
        for law in TRACE_LAWS:
            # Two collectives share a link otherwise than one that stands for both.
            is_near = number > 0 and is_narrow and credit > 1
            if law is not law_price_is_the_traces or not is_near:
                law(plan, profile, cluster, trace)


@each("planner", examples("planner"), ids=_id)
def test_example_is_of_its_file(planner: Any) -> None:
    own = planner.func if isinstance(planner, partial) else planner
    assert load("planner", own.__name__) is own
    plan = planner(SOUND, measured(exact_cluster()))
    assert plan.planner == own.__name__
    if isinstance(planner, partial):
        assert planner.keywords.items() <= plan.settings.items(), (
            "settings are not recorded"
        )


@each("name", names("planner"))
def test_with_no_settings_it_is_an_example(name: str) -> None:
    planner = load("planner", name)
    assert planner in sys.modules[planner.__module__].EXAMPLES


@each("breaks, words", REFUSED, ids=lambda p: getattr(p, "__name__", ""))
def test_broken_plans_are_refused_by_name(
    breaks: Callable[[Plan], Plan], words: str
) -> None:
    sound = wfbp(SOUND, exact_cluster())
    check(sound, SOUND)
    with pytest.raises(InvalidSetting, match=words):
        check(breaks(sound), SOUND)
    with pytest.raises(InvalidSetting, match=words):
        simulate(breaks(sound), SOUND, exact_cluster())


def _fails(law: Callable[..., None], *args: object) -> bool:
    try:
        law(*args)
    except (AssertionError, InvalidSetting, ValueError, TypeError):
        return True
    return False


@each("law, planner", PLANNER_BITES, ids=lambda p: p.__name__)
def test_planner_laws_bite(law: Callable[..., None], planner: Planner) -> None:
    assert not _fails(law, wfbp, SOUND, exact_cluster())
    assert _fails(law, planner, SOUND, exact_cluster())


@each("law, spoils", TRACE_BITES, ids=lambda p: p.__name__)
def test_trace_laws_bite(
    law: Callable[..., None], spoils: Callable[[Trace], Trace]
) -> None:
    # or latency would hide a link that carries too much
    cluster = exact_cluster(hop_s=0.0)
    plan = wfbp(SOUND, cluster)
    *others, last = plan.messages
    last = last.model_copy(update={"after": (0,)})
    plan = plan.model_copy(update={"messages": (*others, last)})
    trace = simulate(plan, SOUND, cluster)
    assert not _fails(law, plan, SOUND, cluster, trace)
    assert _fails(law, plan, SOUND, cluster, spoils(trace))


def test_every_law_has_a_specimen() -> None:
    assert {law for law, _ in PLANNER_BITES} == set(laws.LAWS)
    assert {law for law, _ in TRACE_BITES} == set(TRACE_LAWS)
