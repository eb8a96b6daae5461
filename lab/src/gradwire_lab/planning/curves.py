"""Figures of a line at many sizes at once, and the bound of messages at once."""

import numpy as np

from gradwire.contract.bounds import check_whole
from gradwire.planning.data.fit import Floats, LineFit
from gradwire.planning.data.plan import MOST_CREDIT


def check_credit(value: int) -> None:
    """Refuses ``value`` unless it is a whole number from 1 to ``MOST_CREDIT``."""
    check_whole("credit", value, "4 is usual", most=MOST_CREDIT)


def measured_each(line: LineFit, size_S: Floats) -> Floats:
    """``LineFit.measured_s`` of many positive sizes at once, with the same bits.

    >>> samples = ((1, 2.0), (3, 2.0), (5, 6.0))
    >>> bent = LineFit(alpha_s=1.0, per_unit_s=1.0, samples=samples)
    >>> measured_each(bent, np.array([0.5, 2, 4, 6])).tolist()
    [2.0, 2.0, 4.0, 7.0]
    """
    samples = sorted(line.samples)
    if len(samples) < 2:
        return line.alpha_s + line.per_unit_s * size_S
    at_K, seconds_K = np.array(samples, dtype=np.float64).T
    found_S = np.full(np.shape(size_S), seconds_K[0])
    inside_S = (at_K[0] < size_S) & (size_S <= at_K[-1])
    size_I = size_S[inside_S]
    high_I = np.searchsorted(at_K, size_I)
    low_I = high_I - 1
    between_I = at_K[high_I] - at_K[low_I]
    rise_I = seconds_K[high_I] - seconds_K[low_I]
    beyond_low_I = size_I - at_K[low_I]
    found_S[inside_S] = seconds_K[low_I] + rise_I * beyond_low_I / between_I
    beyond_S = size_S > at_K[-1]
    excess = size_S[beyond_S] - at_K[-1]
    found_S[beyond_S] = seconds_K[-1] + line.tail_s * excess
    return found_S
