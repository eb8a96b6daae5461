"""Links of a wide area: distance, unlike rates of both directions, and slow hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.contract.bounds import check_number
from gradwire.contract.units import format_rate, parse_rate
from gradwire.errors import invalid

LEAST_RATE = 12_500.0
MOST_RATE = 12.5e9
_MOST_DELAY_S = 10.0


def check_rate(what: str, given: float) -> None:
    """Refuses rates that no link here can have."""
    if not LEAST_RATE <= given <= MOST_RATE:
        raise invalid(
            what,
            given,
            "between 12500 (100kbit) and 12.5e9 (100gbit)",
            'units.parse_rate("500mbit") gives bytes per second',
        )


@dataclass(frozen=True, kw_only=True)
class WideArea:
    """How links differ from equal ones on one switch.

    Args:
        delay_s: Seconds that each packet takes one way, 0 to 10. A round trip takes
            twice as long. Default 0.
        jitter_s: Each packet takes 0 to this many seconds more, evenly drawn, 0 to 10.
            Packets from one host to another keep their order. Default 0.
        up_bytes_per_s: Rate of what a host sends. Default: that of the testbed.
        down_bytes_per_s: Rate of what a host receives. Default: that of the testbed.
        slow: Hosts, each with the rate of both its directions.

    Raises:
        InvalidSetting: A number is out of range, or a host is named twice.

    >>> far = WideArea(delay_s=0.04, up_bytes_per_s=1e6, slow=((2, 5e5),))
    >>> far.up(0, 2e6), far.up(2, 2e6), far.down(0, 2e6)
    (1000000.0, 500000.0, 2000000.0)
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    slow: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s"):
            given = getattr(self, name)
            accepted = f"0 to {_MOST_DELAY_S:g} seconds"
            check_number(name, given, accepted, "leave it out", 0.0, _MOST_DELAY_S)
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None:
                check_rate(name, rate)
        for host, rate in self.slow:
            check_rate(f"the rate of slow host {host}", rate)
        hosts = [host for host, _ in self.slow]
        if len(set(hosts)) < len(hosts):
            raise invalid("slow hosts", hosts, "each host once", "leave one out")

    @property
    def is_far(self) -> bool:
        """Whether packets have to be kept back."""
        return self.delay_s > 0 or self.jitter_s > 0

    def up(self, host: int, rate_bytes_per_s: float) -> float:
        """The rate of what a host sends, on links of this rate."""
        return dict(self.slow).get(host, self.up_bytes_per_s or rate_bytes_per_s)

    def down(self, host: int, rate_bytes_per_s: float) -> float:
        """The rate of what a host receives, on links of this rate."""
        return dict(self.slow).get(host, self.down_bytes_per_s or rate_bytes_per_s)

    def least(self, rate_bytes_per_s: float) -> float:
        """The least rate of all links and directions, on links of this rate."""
        up = self.up(-1, rate_bytes_per_s)
        down = self.down(-1, rate_bytes_per_s)
        return min(up, down, *(rate for _, rate in self.slow))

    def scaled(self, *, rates: float, seconds: float) -> WideArea:
        """Links whose rates and seconds are these multiples."""
        up = self.up_bytes_per_s
        down = self.down_bytes_per_s
        return WideArea(
            delay_s=seconds * self.delay_s,
            jitter_s=seconds * self.jitter_s,
            up_bytes_per_s=None if up is None else rates * up,
            down_bytes_per_s=None if down is None else rates * down,
            slow=tuple((host, rates * rate) for host, rate in self.slow),
        )

    def __str__(self) -> str:
        """Words to put behind a rate; none where links are equal and near.

        >>> str(WideArea(delay_s=0.04, down_bytes_per_s=1.25e6))
        ', 40 ms one way, 10.0 Mbit/s down'
        """
        words = []
        if self.is_far:
            jitter = f" to {1e3 * (self.delay_s + self.jitter_s):g}"
            words.append(
                f"{1e3 * self.delay_s:g}{jitter * (self.jitter_s > 0)} ms one way"
            )
        for name, rate in (
            ("up", self.up_bytes_per_s),
            ("down", self.down_bytes_per_s),
        ):
            if rate is not None:
                words.append(f"{format_rate(rate)} {name}")
        words += [f"host{host} at {format_rate(rate)}" for host, rate in self.slow]
        return "".join(f", {word}" for word in words)


NEAR = WideArea()
"""Equal links on one switch."""


def refuse_loopback(rates: Sequence[float | None], wide_area: WideArea) -> None:
    """Refuses distance and rates of directions where one link is the loopback.

    Raises:
        InvalidSetting: One of the rates is None, and links are not equal and near.
    """
    if wide_area != NEAR and None in rates:
        accepted = f"a rate, as loopback cannot have{str(wide_area)[1:]}"
        raise invalid("rate", "loopback", accepted, "write --rate 100mbit")


def parse_slow(given: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Reads slow hosts as they are written, each ``HOST=RATE``.

    Args:
        given: Texts such as ``2=10mbit`` or ``host2=10mbit``.

    Returns:
        Numbers of hosts, each with its rate in bytes per second.

    Raises:
        InvalidSetting: A text has another form.

    >>> parse_slow(["2=10mbit"])
    ((2, 1250000.0),)
    """
    pairs = []
    for text in given:
        name, _, rate = text.partition("=")
        number = name.strip().removeprefix("host")
        if not (number.isascii() and number.isdigit() and len(number) < 4 and rate):
            raise invalid("slow", text, "HOST=RATE", f"write {number or 1}=10mbit")
        pairs.append((int(number), parse_rate(rate)))
    return tuple(pairs)


def read_wide_area(
    delay_ms: float,
    jitter_ms: float,
    up: str | None,
    down: str | None,
    slow: Sequence[str] | None,
) -> WideArea:
    """Reads the links that options ask for.

    Args:
        delay_ms: Milliseconds that each packet takes one way.
        jitter_ms: Milliseconds more, evenly drawn up to this.
        up: The rate of what a host sends, such as ``100mbit``. Default: the testbed's.
        down: The rate of what a host receives. Default: that of the testbed.
        slow: Hosts with another rate, each ``HOST=RATE``.

    Raises:
        InvalidSetting: An option has another form, or is out of range.

    >>> read_wide_area(40, 0, None, "10mbit", None) == WideArea(
    ...     delay_s=0.04, down_bytes_per_s=1.25e6
    ... )
    True
    """
    return WideArea(
        delay_s=delay_ms / 1e3,
        jitter_s=jitter_ms / 1e3,
        up_bytes_per_s=None if up is None else parse_rate(up),
        down_bytes_per_s=None if down is None else parse_rate(down),
        slow=parse_slow(slow or ()),
    )
