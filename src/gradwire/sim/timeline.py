"""simulate: one iteration of a plan as a trace of one representative rank; all ranks are alike."""

from __future__ import annotations

from collections.abc import Iterator

from ..cost.cluster import Cluster
from ..cost.profile import Profile
from ..planner._types import Message, Plan
from ..trace.span import Span, Trace
from .clock import Timing, run


def simulate(plan: Plan, profile: Profile, cluster: Cluster) -> Trace:
    """The trace of one iteration, from the start of its backward pass to the end of the forward.

    Lanes: "backward" and "forward" with one span a layer, "communication" with one span a message,
    whose ``size_bytes`` is what the rank sends in it. ``Trace.iteration_s`` is US-Byte's t_iter
    (equation 12). Raises ``InvalidSetting`` for a plan that is not sound for the profile.
    """
    return Trace.of(_spans(plan, profile, cluster, run(plan, profile, cluster)))


def _spans(plan: Plan, profile: Profile, cluster: Cluster, timing: Timing) -> Iterator[Span]:
    for i, layer in enumerate(profile.layers):
        start_s, end_s = timing.backward_start_s[i], timing.backward_end_s[i]
        yield Span(0, "backward", layer.name, start_s, end_s, step=0)
        start_s, end_s = timing.forward_start_s[i], timing.forward_end_s[i]
        yield Span(0, "forward", layer.name, start_s, end_s, step=0)
    for number, message in enumerate(plan.messages):
        yield Span(
            0,
            "communication",
            _label(message),
            timing.message_start_s[number],
            timing.message_end_s[number],
            size_bytes=cluster.wire_bytes(timing.message_bytes[number]),
            step=0,
            message=number,
        )


def _label(message: Message) -> str:
    first, *others = message.chunks
    label = f"{first.tensor}[{first.start}:{first.stop}]"
    return f"{label} and {len(others)} more" if others else label
