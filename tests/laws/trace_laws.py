"""The laws of simulated traces, which take any plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from gradwire.contract.trace.span import Span, Trace
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.price import iteration_s

SLACK = 1e-9
"""Relative; times are sums of a few hundred floats."""


def _messages(plan: Plan, trace: Trace) -> list[Span]:
    """One span for each message, from its first verb for the network to its last."""
    spans: dict[int, Span] = {}
    for span in trace.spans:
        if span.lane == "communication":
            first = spans.setdefault(span.message, span)
            spans[span.message] = replace(
                first, start_s=min(first.start_s, span.start_s), end_s=max(first.end_s, span.end_s)
            )
    assert sorted(spans) == list(range(len(plan.messages))), "a message never left"
    return [spans[number] for number in range(len(plan.messages))]


def _size_bytes(plan: Plan, profile: Profile, number: int) -> int:
    items = {t.name: t.size_bytes // max(1, t.numel) for la in profile.layers for t in la.tensors}
    return sum(chunk.numel * items[chunk.tensor] for chunk in plan.messages[number].chunks)


def _lane(trace: Trace, lane: str) -> dict[str, Span]:
    return {span.name: span for span in trace.spans if span.lane == lane}


def _owners(profile: Profile) -> dict[str, str]:
    return {tensor.name: layer.name for layer in profile.layers for tensor in layer.tensors}


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
        assert after.start_s >= before.end_s, f"two messages on lane {after.message % plan.credit}"


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
        assert span.start_s == max(causes), f"message {number} could start at {max(causes)}"


def law_no_link_above_100_percent(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    """In no stretch of time are more bytes carried whole than the link carries in it."""
    by_end = sorted(_messages(plan, trace), key=lambda span: span.end_s)
    for one in by_end:
        work_s = 0.0
        for span in by_end:
            if span.start_s >= one.start_s:
                work_s += cluster.beta_s_per_byte * _size_bytes(plan, profile, span.message)
                assert work_s <= (span.end_s - one.start_s) * (1 + SLACK) + SLACK


def law_each_message_takes_its_time(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    for span in _messages(plan, trace):
        alone_s = cluster.all_reduce_s(_size_bytes(plan, profile, span.message))
        assert span.duration_s >= alone_s * (1 - SLACK) - SLACK
        if plan.credit == 1:
            assert span.duration_s <= alone_s * (1 + SLACK) + SLACK


def law_forward_waits_for_its_messages(
    plan: Plan, profile: Profile, cluster: Cluster, trace: Trace
) -> None:
    forward, owners = _lane(trace, "forward"), _owners(profile)
    for span in _messages(plan, trace):
        for chunk in plan.messages[span.message].chunks:
            first = owners[chunk.tensor] if plan.overlap_forward else profile.layers[0].name
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


def law_bytes_are_the_rings(plan: Plan, profile: Profile, cluster: Cluster, trace: Trace) -> None:
    n = cluster.num_ranks
    for span in _messages(plan, trace):
        assert span.size_bytes == 2 * (n - 1) * _size_bytes(plan, profile, span.message) // n


def law_price_is_the_traces(plan: Plan, profile: Profile, cluster: Cluster, trace: Trace) -> None:
    """To the last bit for the representative rank, to rounding for one of all ranks."""
    price_s = iteration_s(plan, profile, cluster)
    assert abs(price_s - trace.iteration_s) <= SLACK * price_s


DENSE_LAWS = (
    law_no_message_waits_for_nothing,
    law_no_link_above_100_percent,
    law_each_message_takes_its_time,
    law_bytes_are_the_rings,
)
"""Of plans whose messages are all-reduces of plain gradients: nothing is computed for them."""

LAWS = (
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
        return LAWS
    if cluster.num_ranks == 1:  # other exchanges send nothing then
        return (law_layers_run_one_behind_the_other, law_price_is_the_traces)
    others = tuple(law for law in LAWS if law not in DENSE_LAWS)
    if plan.credit == 1:
        return others
    # On another channel a message may be encoded, and start, before the one ahead of it.
    return tuple(law for law in others if law is not law_messages_start_in_issue_order)
