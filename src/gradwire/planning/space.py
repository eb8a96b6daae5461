"""The values of a setting that are worth trying; each planner declares its own in ``SEARCH``."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Trial(Protocol):
    """The part of optuna's trial that gradwire uses."""

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int: ...


class WholeNumbers(NamedTuple):
    """Whole numbers from ``low`` to ``high``, both included.

    On a ``logarithmic`` scale 1 MiB is as far from 2 MiB as from 512 KiB, which suits sizes.
    """

    low: int
    high: int
    logarithmic: bool = False

    def suggested(self, trial: Trial, name: str) -> int:
        return trial.suggest_int(name, self.low, self.high, log=self.logarithmic)


Space = dict[str, WholeNumbers]
"""The values to try of each setting of one planner, by the setting's name."""

SIZES = WholeNumbers(2**16, 2**27, logarithmic=True)
"""Sizes in bytes, from 64 KiB to 128 MiB."""

LANES = WholeNumbers(1, 8)
"""Numbers of messages at once. Each is a channel: a process group with its own connections."""
