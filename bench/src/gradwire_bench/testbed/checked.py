"""Whether shaped hosts have the round trip and the rate that were asked for."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .hosts import Testbed, shaped_hosts
from .launch import launch

_NUM_TURNS = 15
_SECONDS = 2.0
_TOLERANCE = 0.05
_TOLERANCE_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Figures that two hosts measured, beside those that were asked for.

    ``rate_bytes_per_s`` is of Ethernet frames.
    """

    asked_round_trip_s: float
    round_trip_s: float
    asked_rate_bytes_per_s: float
    rate_bytes_per_s: float
    jitter_s: float = 0.0

    @property
    def has_round_trip(self) -> bool:
        """Whether it is within 5 % or 0.5 ms, beside the jitter of both ways."""
        tolerance_s = max(_TOLERANCE_S, _TOLERANCE * self.asked_round_trip_s)
        off_s = abs(self.round_trip_s - self.asked_round_trip_s)
        return off_s <= tolerance_s + self.jitter_s

    @property
    def has_rate(self) -> bool:
        """Whether it is within 5 %."""
        off = abs(self.rate_bytes_per_s / self.asked_rate_bytes_per_s - 1)
        return off <= _TOLERANCE

    def rows(self) -> list[dict[str, object]]:
        """A row for each, with the verdict."""
        trip: dict[str, object] = {
            "name": "round trip",
            "asked_s": self.asked_round_trip_s,
            "measured_s": self.round_trip_s,
            "verdict": "as asked" if self.has_round_trip else "off",
        }
        rate: dict[str, object] = {
            "name": "rate",
            "asked_bytes_per_s": self.asked_rate_bytes_per_s,
            "measured_bytes_per_s": self.rate_bytes_per_s,
            "verdict": "as asked" if self.has_rate else "off",
        }
        return [trip, rate]


def judge(settings: Testbed, figures: Sequence[float]) -> Checked:
    """Compares host 1's link to host 0 with what was asked for.

    Args:
        settings: Those of the two hosts.
        figures: Bytes per second, then the seconds of each round trip.
    """
    wide = settings.wide_area
    rate = settings.rate_bytes_per_s
    return Checked(
        asked_round_trip_s=2 * wide.delay_s + wide.jitter_s,
        round_trip_s=median(figures[1:]),
        asked_rate_bytes_per_s=min(wide.up(1, rate), wide.down(0, rate)),
        rate_bytes_per_s=figures[0],
        jitter_s=wide.jitter_s,
    )


def check_links(settings: Testbed) -> Checked:
    """Measures two hosts, in about five seconds.

    Raises TestbedUnavailable where the machine cannot make them.
    """
    script = str(Path(__file__).with_name("_probe.py"))
    words = [sys.executable, "-I", "-S", script, str(_NUM_TURNS), str(_SECONDS)]
    with shaped_hosts(settings) as hosts:
        exits = launch(hosts, words, output="none", timeout_s=120.0, check=True)
    return judge(settings, [float(word) for word in exits[1].last_lines[-1].split()])
