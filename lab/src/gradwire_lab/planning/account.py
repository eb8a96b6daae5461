"""Where the time of a plan's iteration goes: what is hidden, what is not, and what
waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import compress

from gradwire.exchange.planned import planned_spec
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.clock import Timing, run_on_clock


def ratio(value: float, other: float) -> float:
    """``value`` / ``other``; 1 where both are 0, and infinity where only ``other`` is.

    >>> ratio(3.0, 2.0), ratio(0.0, 0.0), ratio(1.0, 0.0)
    (1.5, 1.0, inf)
    """
    if other:
        return value / other
    return math.inf if value else 1.0


@dataclass(frozen=True)
class Wait:
    """A layer's next forward that could run, were it not for a message."""

    layer: int
    """The layer's place in forward order."""
    message: int
    """The message that ends last among the messages that the layer waits for."""
    seconds: float


@dataclass(frozen=True)
class Account:
    """One iteration of a plan under the model, and where its seconds go."""

    plan: Plan
    profile: Profile
    timing: Timing
    message_bytes: list[int]
    message_layers: list[set[int]]
    """For each message, the places in forward order of its gradients' layers."""
    latency_s: float
    """The sum of the latencies of all dense messages."""
    transfer_s: float
    """Seconds that the bytes of all dense messages take on a link that does nothing
    else.
    """
    bound_s: float
    """The least seconds that an iteration takes under any plan that sends these
    bytes.
    """

    @classmethod
    def of(cls, plan: Plan, profile: Profile, cluster: Cluster) -> Account:
        timing = run_on_clock(plan, profile, cluster)
        layer_of = profile.layer_of
        message_bytes = bytes_of_messages(plan, profile)
        dense = [message.exchange == DENSE for message in plan.messages]
        transfer_s = cluster.beta_s_per_byte * sum(compress(message_bytes, dense))
        least_s = 0.0
        if any(dense):
            least_s = cluster.alpha_s + transfer_s
        return cls(
            plan=plan,
            profile=profile,
            timing=timing,
            message_bytes=message_bytes,
            message_layers=[
                {layer_of[chunk.tensor] for chunk in message.chunks}
                for message in plan.messages
            ],
            latency_s=cluster.alpha_s * sum(dense),
            transfer_s=transfer_s,
            bound_s=_bound_s(profile, timing, least_s),
        )

    @property
    def iteration_s(self) -> float:
        return self.timing.iteration_s

    @property
    def ready_s(self) -> list[float]:
        """The seconds at which each message's gradients are all ready, with their
        inline encodes.
        """
        ends_s = self.timing.backward_end_s
        return [ends_s[min(layers)] for layers in self.message_layers]

    @property
    def compute_s(self) -> float:
        return self.profile.forward_s + self.profile.backward_s

    @property
    def exposed_s(self) -> float:
        """Seconds that communication adds to those of the computation, and of inline
        encodes.
        """
        return max(0.0, self.iteration_s - self.compute_s - self.timing.inline_s)

    def waits(self) -> list[Wait]:
        """Every layer's forward that waits for a message, the longest wait first."""
        timing = self.timing
        last = dict[int, int]()
        for number, layers in enumerate(self.message_layers):
            for layer in layers if self.plan.overlap_forward else (0,):
                before = last.setdefault(layer, number)
                if timing.message_end_s[number] > timing.message_end_s[before]:
                    last[layer] = number
        before_s = [timing.backward_end_s[0], *timing.forward_end_s[:-1]]
        waits = [
            Wait(layer, last.get(layer, -1), start_s - could_s)
            for layer, (start_s, could_s) in enumerate(
                zip(timing.forward_start_s, before_s, strict=True)
            )
            if start_s > could_s
        ]
        return sorted(waits, key=lambda wait: -wait.seconds)

    def hidden_behind(self, number: int) -> tuple[str, float]:
        """The layers that a message's time is hidden behind, in words, and for how many
        seconds.
        """
        start_s = self.timing.message_start_s[number]
        end_s = self.timing.message_end_s[number]
        names = [layer.name for layer in self.profile.layers]
        timing = self.timing
        lanes = (
            (
                "backward",
                names[::-1],
                timing.backward_start_s[::-1],
                timing.backward_end_s[::-1],
            ),
            ("forward", names, timing.forward_start_s, timing.forward_end_s),
        )
        words = []
        hidden_s = 0.0
        for lane, layers, starts_s, ends_s in lanes:
            shared = [
                (name, min(end_s, e) - max(start_s, s))
                for name, s, e in zip(layers, starts_s, ends_s, strict=True)
                if min(end_s, e) > max(start_s, s)
            ]
            hidden_s += sum(seconds for _, seconds in shared)
            if shared:
                first = shared[0][0]
                until = shared[-1][0]
                words.append(
                    f"{lane} of {first}" + (f" to {until}" if until != first else "")
                )
        return " and ".join(words) or "nothing", hidden_s

    def idle_though_ready(self) -> tuple[float, int]:
        """Seconds in which nothing is on the wire though gradients are ready behind the
        head of the line, and the message that is longest such a head (-1 where there is
        none).
        """
        timing = self.timing
        ready_s = self.ready_s
        found_s = 0.0
        longest_s = 0.0
        head = -1
        earliest_s = [float("inf")] * (len(ready_s) + 1)
        for number in range(len(ready_s) - 1, -1, -1):
            earliest_s[number] = min(earliest_s[number + 1], ready_s[number])
        free_s = 0.0
        for number, start_s in enumerate(timing.message_start_s):
            idle_s = start_s - max(free_s, earliest_s[number + 1])
            if idle_s > 0:
                found_s += idle_s
                if idle_s > longest_s:
                    longest_s = idle_s
                    head = number
            free_s = max(free_s, timing.message_end_s[number])
        return found_s, head


def bytes_of_messages(plan: Plan, profile: Profile) -> list[int]:
    """The bytes of the gradients in each message."""
    tensors = profile.tensors
    return [
        planned_spec(message, tensors, is_shaped=False).size_bytes
        for message in plan.messages
    ]


def _bound_s(profile: Profile, timing: Timing, communication_s: float) -> float:
    """The longer of two ways that no plan can shorten: the computation, and the
    communication between the first gradient that is ready and the last layer's
    forward.
    """
    first_ready_s = min(
        (
            end_s
            for layer, end_s in zip(profile.layers, timing.backward_end_s, strict=True)
            if layer.size_bytes
        ),
        default=0.0,
    )
    alone_s = profile.forward_s + profile.backward_s
    return max(alone_s, first_ready_s + communication_s + profile.layers[-1].forward_s)
