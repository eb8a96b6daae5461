"""Distance: its part in the cost of a verb, by the hops in the runtime.

Source: what gloo does in torch 2.13, by its own source and on 4 far hosts. Its rings
    send in halves of a round (``IN_FLIGHT``), so the distance of one half is hidden
    behind the bytes of the other. Hosts with links of 50 Mbit/s summed 1.85 MB in 0.47
    s where they were near, in 0.50 s 10 ms away and in 0.78 s 40 ms away. A round trip
    for each of the 6 rounds would be 0.12 and 0.48 s.
Not modelled: slow start of TCP and its windows; a tree's notes, which go ahead; notes
    that wait behind payloads of other messages. Two of those rings at once took 1.13 s,
    and near hosts 0.97 s.
"""

from __future__ import annotations

from ...collective.steps.travel import (
    IN_FLIGHT,
    SEGMENT_BYTES,
    hops,
    straight_bytes,
    travel,
)
from .fit import LineFit
from .stored import NonNegative

RINGS = ("all_gather", "all_reduce", "reduce_scatter")
"""Verbs that go round a ring if they are large."""
MOST_BYTES = 2**60


class FarLine(LineFit):
    """The line of a verb between far hosts.

    A long ring waits for notes again and again, however long it is. The link is idle
    then, so a byte may add more seconds than it takes of the link: ``link_s``.
    """

    link_s: NonNegative

    @property
    def busy_s(self) -> float:
        return self.link_s


def far_line(verb: str, world: int, near: LineFit, hop_s: float) -> LineFit:
    """The line of a verb between far hosts.

    ``near`` is its line without distance, and ``hop_s`` the seconds that a hop takes by
    distance alone. A ring's line bends where bytes begin to hide the distance.

    >>> near = LineFit(alpha_s=0.0, per_unit_s=1e-6)
    >>> far = far_line("all_reduce", 4, near, 0.1)
    >>> [round(far.measured_s(size), 3) for size in (4096, 2**20)]
    [0.204, 1.212]
    """
    alpha_s = near.alpha_s + hops(verb, world, straight=True) * hop_s
    if verb not in RINGS:
        return near.model_copy(update={"alpha_s": alpha_s})
    rounds = travel(verb, world).rounds
    longest = MOST_BYTES
    if verb != "all_gather":
        longest = IN_FLIGHT * world * SEGMENT_BYTES

    def ring_s(size_bytes: int) -> float:
        at_most = min(size_bytes, longest)
        bytes_s = near.per_unit_s * at_most / rounds
        segment_s = bytes_s / IN_FLIGHT
        round_s = max(bytes_s, hop_s + segment_s)
        # The first segment is under way when nothing else is, or the last one.
        ends_s = min(hop_s, bytes_s - segment_s)
        return near.alpha_s + rounds * round_s * size_bytes / at_most + ends_s

    border = straight_bytes(verb, world)
    hidden_s = hop_s * IN_FLIGHT / (IN_FLIGHT - 1)
    hidden = min(longest, int(1 + rounds * hidden_s / near.per_unit_s))
    bends = sorted({border + 1, max(border + 1, hidden)})
    if longest < MOST_BYTES:
        bends.append(longest)
    bends.append(4 * bends[-1])
    samples = [(size, ring_s(size)) for size in bends]
    if border:
        samples = [
            (size, alpha_s + near.per_unit_s * size) for size in (1, border)
        ] + samples
    return FarLine.model_construct(
        link_s=near.per_unit_s,
        alpha_s=alpha_s,
        per_unit_s=(samples[-1][1] - samples[-2][1]) / (bends[-1] - bends[-2]),
        samples=tuple(samples),
    )
