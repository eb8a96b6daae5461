"""Figures of what was measured several times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

import torch


def spread(seconds: Sequence[float], what: str = "step") -> dict[str, float]:
    """The median, and the percentiles 20 and 80.

    >>> spread([3.0, 1.0, 2.0])
    {'step_s': 2.0, 'step_p20_s': 1.4, 'step_p80_s': 2.6}
    """
    several = seconds if len(seconds) > 1 else [*seconds, *seconds]
    low, *_, high = quantiles(several, n=5, method="inclusive")
    return {
        f"{what}_s": median(seconds),
        f"{what}_p20_s": low,
        f"{what}_p80_s": high,
    }


def slowest(results: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Seconds of each repeat on the rank that was last."""
    repeats = zip(*(result[name]["seconds"] for result in results), strict=True)
    return [max(repeat) for repeat in repeats]


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Within the block torch computes with ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
