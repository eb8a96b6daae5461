"""Distance: its part in the cost of a verb, by the hops in the runtime.

Source: what gloo does in torch 2.13, by its own source and on 4 far hosts. Its rings
    send in halves of a round (``IN_FLIGHT``), so the distance of one half is hidden
    behind the bytes of the other. With links of 50 Mbit/s, near hosts summed 1.85 MB in
    0.47 s. Hosts 10 ms away took 0.50 s, and hosts 40 ms away 0.78 s. A round trip for
    each of the 6 rounds would be 0.12 and 0.48 s.
Not modelled: slow start of TCP and its windows; notes that wait behind payloads of
    other messages (two of those rings at once took 1.13 s, and near hosts 0.97 s).
"""

from ...collective.steps.travel import (
    AHEAD_BYTES,
    IN_FLIGHT,
    NOTES,
    SEGMENT_BYTES,
    ahead_bytes,
    hops,
    is_straight,
    travel,
)
from .fit import LineFit
from .stored import NonNegative

MOST_BYTES = 2**60


def is_hidden(latency_s: float, world: int, longest_s: float) -> bool:
    """Whether the bytes of long ring all-reduces hide their hops.

    The longest takes ``longest_s``, and a slope is that from a quarter of it on.

    >>> is_hidden(0.002, 4, 0.5), is_hidden(0.04, 4, 0.5)
    (True, False)
    """
    hop_s = (1 + NOTES) * latency_s
    return 4 * hop_s * (2 * travel("all_reduce", world).rounds + 1) <= longest_s


class FarLine(LineFit):
    """The line of a verb between far hosts.

    A long ring waits for notes again and again, however long it is. The link is idle
    then, so a byte may add more seconds than it takes of the link: ``link_s``.
    """

    near_s: NonNegative
    """Seconds of latency without distance, in which hosts may work."""
    link_s: NonNegative

    @property
    def busy_s(self) -> float:
        return self.link_s

    def near_part_s(self, latency_s: float) -> float:
        return min(latency_s, self.near_s)


def far_line(verb: str, world: int, near: LineFit, latency_s: float) -> LineFit:
    """The line of a verb between hosts of this latency.

    ``near`` is its line without distance. The line bends where the runtime posts no
    receives ahead any more. A ring's line also bends where bytes begin to hide hops.

    >>> near = LineFit(alpha_s=0.0, per_unit_s=1e-6)
    >>> far = far_line("all_reduce", 4, near, 0.05)
    >>> [round(far.measured_s(size), 3) for size in (4096, 2**20)]
    [0.104, 1.149]
    """
    num_hops = hops(verb, world)
    ahead = ahead_bytes(verb, world, latency_s)
    hop_s = (1 + NOTES) * latency_s
    alpha_s = near.alpha_s + num_hops * (latency_s if ahead else hop_s)
    if verb == "broadcast":
        # All ranks post their receive when they begin.
        alpha_s = near.alpha_s + (num_hops + NOTES) * latency_s
    samples = []
    if ahead:
        samples = [(size, alpha_s + near.per_unit_s * size) for size in (1, ahead)]
        if is_straight(verb, AHEAD_BYTES, world, latency_s):
            # The first bytes are under way while the notes of others come.
            first_s = near.per_unit_s * ahead
            beyond_s = alpha_s + max(0.0, NOTES * latency_s - first_s)
            for size in (ahead + 1, 4 * (ahead + 1)):
                samples.append((size, beyond_s + near.per_unit_s * size))
        else:
            samples += _ring_samples(verb, world, near, hop_s, ahead + 1)
    line = FarLine.model_construct(
        near_s=near.alpha_s,
        link_s=near.per_unit_s,
        alpha_s=alpha_s,
        per_unit_s=near.per_unit_s,
        samples=tuple(samples),
    )
    return line.model_copy(update={"per_unit_s": line.tail_s})


def _ring_samples(
    verb: str, world: int, near: LineFit, hop_s: float, first: int
) -> list[tuple[int, float]]:
    """Bends of a far ring's line, from the size ``first`` on, and a point beyond."""
    rounds = travel(verb, world).rounds
    longest = MOST_BYTES
    if verb == "all_reduce":
        longest = IN_FLIGHT * world * SEGMENT_BYTES

    def ring_s(size_bytes: int) -> float:
        at_most = min(size_bytes, longest)
        bytes_s = near.per_unit_s * at_most / rounds
        segment_s = bytes_s / IN_FLIGHT
        round_s = max(bytes_s, hop_s + segment_s)
        # The first segment is under way when nothing else is, or the last one.
        ends_s = min(hop_s, bytes_s - segment_s)
        return near.alpha_s + rounds * round_s * size_bytes / at_most + ends_s

    hidden_s = hop_s * IN_FLIGHT / (IN_FLIGHT - 1)
    hidden = min(longest, int(1 + rounds * hidden_s / near.per_unit_s))
    bends = sorted({first, max(first, hidden)})
    if longest < MOST_BYTES:
        bends.append(longest)
    return [(size, ring_s(size)) for size in (*bends, 4 * bends[-1])]
