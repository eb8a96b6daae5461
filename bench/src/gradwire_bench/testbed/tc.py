"""The token bucket filter that slows a link down: its figures and its command.

Three figures decide whether a shaped link behaves like a real one:

- **burst**: the bytes that a link saves up while idle and may then send at once. If it is too
  small, every moment in which the machine's few cores keep a sender waiting is lost for good. If it
  is too large, short messages after a pause travel for free. 40 MB float32 all-reduce by gloo on 4
  hosts, as a ratio
  to 2 (3/4) bytes / rate (1.046 is the floor: 1448 of 1514 bytes are payload), medians of 3 to 6 on
  two cores that other programs used too, with a load average of 2 to 7:
      200 Mbit: 0.7 and 1 ms 1.06 to 1.13, 2 ms 1.09, 2.5 ms 1.05 to 1.07, 4 ms 1.05
      500 Mbit: 1 ms 1.05 to 1.10, 2 ms 1.06, 2.5 ms 1.05 to 1.12, 4 ms 1.04
      1 Gbit: 1 ms 1.05 to 1.10, 2 ms 1.07, 2.5 ms 1.05
  2.5 ms is a compromise: 4 ms would give a short exchange of 30 ms a seventh of its time.
- **limit**: the queue, which drops what does not fit. 20 ms carries a 3-to-1 incast at 1.00 of the
  rate from 50 Mbit to 1 Gbit, for BBR and Reno alike; with a 5 ms queue (and a 1 ms burst) the
  all-reduce took 1.37 of the ideal with Reno; 50 and 100 ms gained nothing.
- **segment**: the largest piece the kernel hands over at once. A piece above the burst is cut up by
  the filter, which costs processor time (all-reduce at 500 Mbit: 1.07, not 1.05), so pieces are
  kept to half of it.

One stream alone got 0.97 to 1.00 of rate * 1448/1514 at 50, 200, 500 Mbit and 1 Gbit.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIN_BURST_BYTES = 32 * 1024
_MIN_LIMIT_BYTES = 256 * 1024
_LIMIT_S = 0.02
_MAX_SEGMENT_BYTES = 65_536  # what Linux hands to an interface at most in one piece


@dataclass(frozen=True, kw_only=True)
class Shaper:
    """Figures of one direction of a link, in bytes.

    ``segment_bytes`` is the largest piece TCP may hand over at once (GSO).
    """

    rate_bytes_per_s: float
    burst_bytes: int
    limit_bytes: int
    segment_bytes: int

    def line(self, device: str) -> str:
        """The ``tc -batch`` line that shapes what ``device`` sends, anew where it is shaped."""
        return (
            f"qdisc replace dev {device} root tbf rate {round(self.rate_bytes_per_s * 8)}bit"
            f" burst {self.burst_bytes} limit {self.limit_bytes}"
        )


def choose_shaper(rate_bytes_per_s: float, mtu: int, burst_s: float) -> Shaper:
    """Burst, queue and segment size for a link."""
    burst_bytes = max(_MIN_BURST_BYTES, 4 * mtu, round(rate_bytes_per_s * burst_s))
    return Shaper(
        rate_bytes_per_s=rate_bytes_per_s,
        burst_bytes=burst_bytes,
        limit_bytes=max(_MIN_LIMIT_BYTES, 4 * burst_bytes, round(rate_bytes_per_s * _LIMIT_S)),
        segment_bytes=min(_MAX_SEGMENT_BYTES, burst_bytes // 2),
    )
