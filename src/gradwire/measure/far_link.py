"""A far link: TCP's settings of this host, and what they cost there.

A sender may have as many bytes on the way as its window. TCP begins with ten segments
and doubles its window in each round trip. After a pause it halves the window for each
time-out that has passed, down to the ten segments (RFC 5681, 4.1; RFC 6928).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..contract.units import format_bytes, format_seconds

SETTINGS = (
    "tcp_congestion_control",
    "tcp_slow_start_after_idle",
    "tcp_rmem",
    "tcp_wmem",
)
FOLDER = Path("/proc/sys/net/ipv4")
LEAST_LOSS_S = 0.01
"""Seconds after a pause below which nothing is said."""
_FIRST_WINDOW_BYTES = 10 * 1448.0
_BUFFER = 2
"""Bytes of a socket's buffer for each byte of its window, as Linux reckons."""
_STAYS_AWAKE = ("bbr",)
"""Congestion controls that keep their rate over a pause."""


@dataclass(frozen=True, kw_only=True)
class FarLink:
    """A link that one connection sends over.

    Args:
        rate_bytes_per_s: Its rate, in bytes per second.
        round_trip_s: Seconds to the other host and back.

    >>> link = FarLink(rate_bytes_per_s=6.25e6, round_trip_s=0.08)
    >>> link.bandwidth_delay_bytes, round(link.idle_loss_s, 2)
    (500000.0, 0.33)
    """

    rate_bytes_per_s: float
    round_trip_s: float

    @property
    def bandwidth_delay_bytes(self) -> float:
        """The bytes on the way while the link is full."""
        return self.rate_bytes_per_s * self.round_trip_s

    @property
    def idle_loss_s(self) -> float:
        """Seconds that the link stays empty after a long pause, at most.

        So long a window that doubles from ten segments does not fill it.
        """
        window_bytes = _FIRST_WINDOW_BYTES
        lost_s = 0.0
        while window_bytes < self.bandwidth_delay_bytes:
            lost_s += self.round_trip_s - window_bytes / self.rate_bytes_per_s
            window_bytes *= 2
        return lost_s


def tcp_settings(folder: Path = FOLDER) -> dict[str, str | OSError]:
    """TCP's settings by name; the error where one cannot be read."""
    found: dict[str, str | OSError] = {}
    for name in SETTINGS:
        try:
            found[name] = " ".join((folder / name).read_text(encoding="ascii").split())
        except OSError as error:
            found[name] = error
    return found


class TcpProblem(NamedTuple):
    """The name of a setting that slows a link down, and the command that mends it."""

    name: str
    problem: str
    remedy: str


def tcp_problems(
    link: FarLink, settings: Mapping[str, str | OSError]
) -> list[TcpProblem]:
    """The settings that slow a link down.

    Args:
        link: The link.
        settings: What ``tcp_settings`` returns. An error is no problem.
    """
    known = {name: text for name, text in settings.items() if isinstance(text, str)}
    problems = []
    is_reset = (
        known.get("tcp_slow_start_after_idle") == "1"
        and known.get("tcp_congestion_control") not in _STAYS_AWAKE
    )
    if is_reset and link.idle_loss_s > LEAST_LOSS_S:
        lost = format_seconds(link.idle_loss_s)
        problems.append(
            TcpProblem(
                "tcp_slow_start_after_idle",
                f"after a pause a connection begins anew: a step loses up to {lost}",
                "sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
            )
        )
    needed_bytes = round(_BUFFER * link.bandwidth_delay_bytes)
    for name in ("tcp_rmem", "tcp_wmem"):
        *smaller, largest = known.get(name, str(needed_bytes)).split()
        if int(largest) < needed_bytes:
            sizes = " ".join([*smaller, str(needed_bytes)])
            problems.append(
                TcpProblem(
                    name,
                    f"a connection's buffer has at most {format_bytes(int(largest))}, "
                    f"and {format_bytes(needed_bytes)} fill the link",
                    f"sysctl -w net.ipv4.{name}='{sizes}'",
                )
            )
    return problems
