"""Figures of what was measured several times."""

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


def quartiles(name: str, figures: Sequence[float]) -> dict[str, float]:
    """The median under this name, and the quartiles beside it.

    >>> quartiles("seconds", [1.0, 2.0, 4.0])
    {'seconds': 2.0, 'seconds_q1': 1.0, 'seconds_q3': 4.0}
    """
    low, middle, high = quantiles(figures, n=4)
    return {name: middle, f"{name}_q1": low, f"{name}_q3": high}


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
