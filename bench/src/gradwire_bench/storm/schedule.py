"""The settings of a storm, and its faults, which are drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from gradwire.contract.bounds import check_whole
from gradwire.errors import invalid

from ..testbed.hosts import Testbed
from ..testbed.wide_area import WideArea

DDP = "DDP, restarted"
TORCHFT = "torchft DiLoCo"
GRADWIRE = "gradwire"
CALM = "gradwire, no faults"
WAYS = (DDP, TORCHFT, GRADWIRE, CALM)
"""The ways to train; the last one only where it is asked for."""
COUNTS = {"kill": 28, "partition": 9, "stop": 8}
"""Faults of the storm that ft-diloco publishes, by kind."""
RANK_HOURS = 16
"""Its length times its ranks: half an hour of 32 ranks."""
LASTS_S = (5.0, 15.0)
"""Seconds until a killed rank starts again, a stopped one goes on, and a link is
whole.
"""


class Fault(NamedTuple):
    """A fault of one rank, and the seconds in which it is in force."""

    begin_s: float
    end_s: float
    kind: str
    rank: int


def faults_of(seed: int, ranks: int, seconds: float, times: float = 1.0) -> list[Fault]:
    """The faults of a storm in order of time, at least one of each kind.

    Args:
        seed: All is drawn from it.
        ranks: The ranks, each of which may be struck.
        seconds: The length. No fault begins in its first tenth or its last quarter.
        times: Faults of a rank in an hour, over those of ft-diloco's storm.

    >>> [fault.kind for fault in faults_of(7, 8, 600.0)]
    ['stop', 'kill', 'kill', 'partition']
    """
    draw = Random(seed)
    share = times * ranks * seconds / 3600 / RANK_HOURS
    faults = []
    for kind, count in COUNTS.items():
        for _ in range(max(1, round(share * count))):
            begin_s = seconds * draw.uniform(0.1, 0.75)
            end_s = begin_s + draw.uniform(*LASTS_S)
            faults.append(Fault(begin_s, end_s, kind, draw.randrange(ranks)))
    return sorted(faults)


def kills_of(seed: int, ranks: int, seconds: float, every_s: float) -> list[Fault]:
    """A kill of a drawn rank every so many seconds, but for the last quarter.

    >>> [fault.begin_s for fault in kills_of(7, 8, 120.0, 30.0)]
    [30.0, 60.0, 90.0]
    """
    draw = Random(seed)
    faults = []
    for place in range(int(0.75 * seconds / every_s)):
        begin_s = (1 + place) * every_s
        end_s = begin_s + draw.uniform(*LASTS_S)
        faults.append(Fault(begin_s, end_s, "kill", draw.randrange(ranks)))
    return faults


@dataclass(frozen=True, kw_only=True)
class StormBench:
    """The settings of ``bench storm``.

    Args:
        hosts: The ranks, each on a host of its own, from 2.
        seconds: The length of the storm under each way, a whole number from 10.
        seed: All faults are drawn from it.
        times: Faults over those of ft-diloco's storm.
        kill_every_s: Seconds from one kill to the next, in place of that storm. 0: that
            storm.
        width: The width of the model, which has four layers.
        rate_bytes_per_s: The rate of each host's link.
        delay_s: Seconds that a packet takes one way.
        step_s: Seconds of the first rank's step.
        every: Local steps between two exchanges, and steps between two checkpoints.
        timeout_s: The longest wait for a rank.
        ways: Names of ways to train. Empty: all.
    """

    hosts: int = 8
    seconds: int = 600
    seed: int = 7
    times: float = 1.0
    kill_every_s: float = 0.0
    width: int = 128
    rate_bytes_per_s: float = 6.25e6
    delay_s: float = 0.04
    step_s: float = 0.5
    every: int = 24
    timeout_s: float = 15.0
    ways: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_whole("hosts", self.hosts, "write --hosts 8", least=2)
        check_whole("seconds", self.seconds, "write --seconds 60", least=10)
        for name in self.ways:
            if name not in WAYS:
                raise invalid("way", name, ", ".join(WAYS), "or leave it out")

    @property
    def testbed(self) -> Testbed:
        """The hosts of the ranks, and one more."""
        return Testbed(
            hosts=self.hosts + 1,
            rate_bytes_per_s=self.rate_bytes_per_s,
            wide_area=WideArea(delay_s=self.delay_s),
        )

    @property
    def faults(self) -> list[Fault]:
        """The schedule."""
        if self.kill_every_s:
            return kills_of(self.seed, self.hosts, self.seconds, self.kill_every_s)
        return faults_of(self.seed, self.hosts, self.seconds, self.times)

    @property
    def fraction_alive(self) -> float:
        """The share of ranks' seconds in which they are neither killed nor stopped.

        No way's useful time is longer.
        """
        struck_s = sum(
            min(fault.end_s, self.seconds) - fault.begin_s
            for fault in self.faults
            if fault.kind != "partition"
        )
        return 1 - struck_s / (self.hosts * self.seconds)

    @property
    def tail_s(self) -> float:
        """The seconds after the storm in which its last steps may reach the model."""
        return 4 * self.every * self.step_s + self.timeout_s
