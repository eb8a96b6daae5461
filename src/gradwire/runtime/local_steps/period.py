"""Period: how many local steps lie between two exchanges, chosen while the model trains.

A longer period sends less and learns a little worse, so the shortest one is taken at which
exchanges hardly slow training down.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ...contract.units import format_seconds
from ..step.engine import Engine, figures_of_all

LEAST, MOST = 4, 32
"""Local steps between two exchanges, at least and at most; training begins with the least."""
SHARE = 0.1
"""The part of the time that exchanges may keep ranks waiting."""
FIRST, AGAIN = 4, 16
"""Exchanges before the first choice, of which one is not counted, and between later ones."""
_log = logging.getLogger("gradwire")


def shortest(waited_s: float, local_s: float, least: int = LEAST) -> int:
    """The fewest local steps between exchanges that keep ranks waiting for ``SHARE`` of the time.

    >>> shortest(waited_s=0.18, local_s=0.1), shortest(waited_s=9.0, local_s=0.1)
    (17, 32)
    """
    gap = math.ceil(waited_s * (1 - SHARE) / (SHARE * max(local_s, 1e-9)) - 1e-9)
    return max(least, min(MOST, gap))


@dataclass
class ChosenGap:
    """Choices of the local steps between exchanges, from seconds that ranks tell each other.

    A rank that is late makes the others wait, which no period mends. So what an exchange takes is
    what it took the rank that waited least, and a local step what it took the slowest rank.
    """

    gap: int = LEAST
    least: int = LEAST
    _num_since: int = 0
    _num_choices: int = 0
    _waits_s: list[float] = field(default_factory=list)
    _steps_s: list[float] = field(default_factory=list)

    def count(self, waited_s: float, local_s: float) -> None:
        """Counts one exchange: the seconds this rank waited for it, and those of a local step."""
        self._num_since += 1
        if self._num_since > 1 or self._num_choices:
            self._waits_s.append(waited_s)
            self._steps_s.append(local_s)

    @property
    def is_due(self) -> bool:
        """Whether it is time to choose, which follows from the number of exchanges alone."""
        return self._num_since >= (AGAIN if self._num_choices else FIRST)

    def choose(self, engine: Engine) -> int:
        """The gap from now on; all ranks call this after the same exchange."""
        own = median(self._waits_s), median(self._steps_s)
        self._num_since, self._waits_s, self._steps_s = 0, [], []
        self._num_choices += 1
        self._take(figures_of_all(engine, own))
        return self.gap

    def _take(self, told: Sequence[Sequence[float]]) -> None:
        waited_s = min(waited for waited, _ in told)
        local_s = max(local for _, local in told)
        gap = shortest(waited_s, local_s, self.least)
        if self._num_choices > 1 and 2 / 3 < gap / self.gap < 3 / 2:
            return  # no change that is worth a word
        _log.info(
            "an exchange keeps ranks waiting for %s and a local step takes %s: from now on "
            "they exchange every %d steps",
            *(format_seconds(waited_s), format_seconds(local_s), gap),
        )
        self.gap = gap
