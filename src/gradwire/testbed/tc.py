"""The token bucket filter that slows a link down: its figures and its command.

PLACEHOLDER
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
        """The ``tc -batch`` line that shapes what ``device`` sends."""
        return (
            f"qdisc add dev {device} root tbf rate {round(self.rate_bytes_per_s * 8)}bit"
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
