"""What values of a setting are worth trying; each planner declares its own in its ``SEARCH``."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Trial(Protocol):
    """What is used of optuna's trial."""

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int: ...


class WholeNumbers(NamedTuple):
    """Whole numbers from ``low`` to ``high``, both included.

    On a ``logarithmic`` scale 1 MiB is as far from 2 MiB as from 512 KiB, as sizes should be.
    """

    low: int
    high: int
    logarithmic: bool = False

    def suggested(self, trial: Trial, name: str) -> int:
        return trial.suggest_int(name, self.low, self.high, log=self.logarithmic)


Space = dict[str, WholeNumbers]
"""Settings of one planner by name, its ``SEARCH``."""

SIZES = WholeNumbers(2**16, 2**27, logarithmic=True)
"""Bytes from 64 KiB to 128 MiB."""

LANES = WholeNumbers(1, 8)
"""Messages at once; each lane is a process group with connections of its own."""
