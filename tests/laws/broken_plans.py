"""Deliberately wrong plans, planners and traces, each wrong in the one thing its name says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gradwire.contract.trace.span import Span, Trace
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire_lab.laws import planners as laws
from tests.laws import trace_laws


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


def waits_in_a_circle(plan: Plan) -> Plan:
    return _after(plan, {0: (1,), 1: (2,), 2: (0,)})


def waits_on_its_own_lane(plan: Plan) -> Plan:
    """Message 2 follows message 0 there, so either waits for the other whatever lanes there are."""
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
    return _with(plan, messages=(first, *plan.messages[1:]), exchanges={"other": exchange})


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
        _with(doubled_range(plan), exchanges={}), EACH, early=(plan.messages[0].chunks[0].tensor,)
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
    (doubled_block, r"doubled range: '\w+' elements 0:\d+ are in message 0 and in message \d"),
    (doubled_range, r"doubled range: '\w+' elements .* are in message 0 and in message 0"),
    (unknown_tensor, "message 0: unknown tensor 'no.such'"),
    (beyond_the_end, r"message 0: range 0:\d+ of '\w+' lies outside its \d+ elements"),
    (before_the_start, r"message 0: range -1:\d+ of '\w+' lies outside"),
    (empty_range, r"message 0: range 0:0 of '\w+' is empty"),
    (empty_message, r"message \d is empty"),
    (mixed_dtypes, "message 0 mixes dtypes: bfloat16, float32"),
    (no_credit, "credit 0 lets no message start"),
    (
        waits_in_a_circle,
        "cyclic dependency: message (0|1|2) waits for message . waits for message . waits for "
        r"message \1",
    ),
    (waits_on_its_own_lane, "order that cannot be met: message 0 waits for message 2, which is"),
    (waits_for_one_behind, "order that cannot be met: message 1 waits for message 2, which is"),
    (waits_for_itself, "order that cannot be met: message 1 waits for itself"),
    (waits_for_none_there_is, "order that cannot be met: message 1 waits for message 9; there are"),
    (waits_for_one_before_the_first, "cannot be met: message 1 waits for message -1; there are"),
    (encodes_what_is_dense, "is dense, so 't3' is not encoded"),
    (encodes_what_is_elsewhere, "is to be encoded, and is not in the message"),
    (encodes_twice, "is to be encoded twice"),
    (encodes_a_part_of_one_encode, "is encoded as one, so .* cannot be encoded early"),
    (encodes_a_cut_tensor, "is to be encoded by itself, and is cut"),
    (unknown_exchange, "message 0: unknown exchange 'sparse'; there are: dense"),
    (dense_defined_again, "exchange 'dense' is built in"),
    (
        foreign_profile,
        "for 'resnet50' cannot be used: made for model 'resnet50', and the profile is of",
    ),
)
"""What is wrong, and the words by which ``check`` must call it."""


def loses_blocks(profile: Profile, cluster: Cluster) -> Plan:
    """A planner as the paper's algorithm 1 is printed: what a message had before is forgotten."""
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
        return Trace.of([*(span for span in trace.spans if span is not last), change(last)])

    return changes


def _all_at_once(span: Span) -> Span:
    return replace(span, start_s=0.0, end_s=span.duration_s)


def _every_message(change: Callable[[Span], Span]) -> Callable[[Trace], Trace]:
    return lambda trace: Trace.of(
        change(span) if span.lane == "communication" else span for span in trace.spans
    )


TRACE_BITES = (
    (trace_laws.law_messages_wait_for_gradients, _every_message(_all_at_once)),
    (
        trace_laws.law_messages_start_in_issue_order,
        _changed("communication", lambda s: replace(s, start_s=0.0)),
    ),
    (
        trace_laws.law_lanes_carry_one_message_at_a_time,
        _changed("communication", lambda s: replace(s, start_s=0.0)),
    ),
    (
        trace_laws.law_messages_wait_for_those_they_name,
        _changed("communication", lambda s: replace(s, start_s=0.0)),
    ),
    (
        trace_laws.law_no_message_waits_for_nothing,
        _changed("communication", lambda s: replace(s, start_s=s.start_s + 1e-6)),
    ),
    (trace_laws.law_no_link_above_100_percent, _every_message(_all_at_once)),
    (
        trace_laws.law_each_message_takes_its_time,
        _changed("communication", lambda s: replace(s, end_s=s.start_s)),
    ),
    (
        trace_laws.law_forward_waits_for_its_messages,
        _changed("communication", lambda s: replace(s, end_s=s.end_s + 100)),
    ),
    (
        trace_laws.law_layers_run_one_behind_the_other,
        _changed("forward", lambda s: replace(s, start_s=0.0, end_s=s.duration_s)),
    ),
    (
        trace_laws.law_bytes_are_the_rings,
        _changed("communication", lambda s: replace(s, size_bytes=s.size_bytes + 1)),
    ),
    (
        trace_laws.law_price_is_the_traces,
        _changed("forward", lambda s: replace(s, end_s=s.end_s + 1e-6)),
    ),
)
