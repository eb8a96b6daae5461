"""LineFit: seconds = alpha + slope * size, fitted to measurements.

Source: the linear cost of an all-reduce in US-Byte, equation 14 (t = a + b M), and in
    section 3.2 of HiPress; here for any verb (size in bytes) and for encode, decode and
    merge (in elements).
Differences from the papers: they fit absolute times. Messages differ in size by a
    factor of ten thousand, so the error that is made small here is the relative one:
    small messages, which decide alpha, count as much as large ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InvalidSetting
from .stored import Frozen, NonNegative, Whole

Floats = npt.NDArray[np.floating[Any]]
Samples = tuple[tuple[int, float], ...]
"""(size, seconds), in the order in which they were measured."""


class LineFit(Frozen):
    """The cost of something by its size: seconds = alpha_s + per_unit_s * size.

    ``alpha_s`` is the cost however small the size is, and ``per_unit_s`` what each byte
    (or element) adds; neither is negative. ``residual`` is the root mean square of the
    relative errors.
    """

    alpha_s: NonNegative
    per_unit_s: NonNegative
    residual: NonNegative = 0.0
    samples: tuple[tuple[Whole, NonNegative], ...] = ()

    def seconds(self, size: float) -> float:
        """Seconds of a message of that size; nothing costs nothing.

        >>> LineFit(alpha_s=1e-3, per_unit_s=1e-6).seconds(1000)
        0.002
        """
        return self.alpha_s + self.per_unit_s * size if size > 0 else 0.0

    def measured_s(self, size: float) -> float:
        """Seconds by the measurements themselves: in proportion between two sizes, with
        ``tail_s`` for each unit beyond the largest; by the fitted line where no samples
        are kept.

        Real costs bend, because the bytes of a long message hide its latency. So a line
        through all sizes is 10 % off in its middle.

        >>> samples = ((1, 2.0), (3, 2.0), (5, 6.0))
        >>> bent = LineFit(alpha_s=1.0, per_unit_s=1.0, samples=samples)
        >>> [bent.measured_s(size) for size in (0, 0.5, 2, 4, 6)]
        [0.0, 2.0, 2.0, 4.0, 7.0]
        """
        samples = sorted(self.samples)
        if len(samples) < 2 or size <= 0:
            return self.seconds(size)
        last, last_s = samples[-1]
        if size > last:
            return last_s + self.tail_s * (size - last)
        place = bisect_left(samples, size, key=itemgetter(0))
        high, high_s = samples[place]
        low, low_s = samples[max(0, place - 1)]
        if place == 0:
            return high_s
        return low_s + (high_s - low_s) * (size - low) / (high - low)

    @property
    def is_nothing(self) -> bool:
        """Whether it costs nothing whatever its size, as what is never done."""
        return not self.alpha_s and not self.per_unit_s

    @property
    def tail_s(self) -> float:
        """Seconds that a unit adds where there are many: what is left of the cost of
        long messages when their own latency is taken off.
        """
        samples = sorted(self.samples)
        # Samples of one size tell no slope.
        if not samples or samples[0][0] == samples[-1][0]:
            return self.per_unit_s
        large, large_s = samples[-1]
        shorter = [sample for sample in samples if 4 * sample[0] <= large] or samples[
            :1
        ]
        small, small_s = shorter[-1]
        return max(0.0, large_s - small_s) / (large - small)

    @property
    def busy_s(self) -> float:
        """Seconds of a whole link that a unit takes."""
        return self.tail_s

    def near_part_s(self, latency_s: float) -> float:
        """The seconds of a latency that are not distance."""
        return latency_s

    def times(self, factor: float) -> LineFit:
        """The line of what takes ``factor`` times as long, whatever the size.

        >>> LineFit(alpha_s=1.0, per_unit_s=2.0, samples=((1, 3.0),)).times(0.5).samples
        ((1, 1.5),)
        """
        return LineFit(
            alpha_s=factor * self.alpha_s,
            per_unit_s=factor * self.per_unit_s,
            residual=self.residual,
            samples=tuple((size, factor * seconds) for size, seconds in self.samples),
        )

    def part_of(self, count: int) -> LineFit:
        """The line of one of ``count`` equal messages on a link, from the line of all.

        The link works for one of them during its part of the seconds. Latencies pass at
        once.

        >>> line = LineFit(alpha_s=1.0, per_unit_s=2.0, samples=((1, 3.0), (4, 9.0)))
        >>> line.part_of(2).samples
        ((1, 2.0), (4, 5.0))
        """
        others_s = self.tail_s * (count - 1) / count
        return LineFit(
            alpha_s=self.alpha_s,
            per_unit_s=max(self.per_unit_s / count, self.per_unit_s - others_s),
            samples=tuple(
                (size, max(seconds / count, seconds - others_s * size))
                for size, seconds in self.samples
            ),
        )

    def parts(self, size: float, host_share: float = 0.0) -> tuple[float, float]:
        """Seconds of latency and of a whole link that ``measured_s`` is made of.

        The link is idle during ``host_share`` of the latency for want of the host,
        whatever else is under way; so this share counts as work.
        """
        work_s = self.busy_s * size
        latency_s = max(0.0, self.measured_s(size) - work_s)
        host_s = host_share * self.near_part_s(latency_s)
        return latency_s - host_s, work_s + host_s


def fit_line(samples: Iterable[tuple[int, float]]) -> LineFit:
    """Least squares of the relative error ((alpha + slope * size - seconds) / seconds).

    A term that would come out negative is 0 and the other is fitted alone. Raises
    ``InvalidSetting`` unless there are three samples, of two sizes, and every time is
    positive and finite.

    >>> found = fit_line([(n, 0.001 + n * 1e-8) for n in (1000, 10_000, 1_000_000)])
    >>> f"{found.alpha_s:.6f} {found.per_unit_s:.1e} {found.residual:.3f}"
    '0.001000 1.0e-08 0.000'
    """
    kept: Samples = tuple((int(size), float(seconds)) for size, seconds in samples)
    if (
        len(kept) < 3
        or len({size for size, _ in kept}) < 2
        or not all(size >= 0 and 0 < seconds < math.inf for size, seconds in kept)
    ):
        raise InvalidSetting(
            "a line is fitted to three or more positive times, of at least two sizes, "
            f"got {list(kept)}; measure more sizes"
        )
    size_S, seconds_S = np.array(kept, dtype=np.float64).T
    # Sizes in units of the largest, or the two columns differ by seven orders of
    # magnitude.
    largest = size_S.max()
    terms_S2 = np.stack([1 / seconds_S, size_S / largest / seconds_S], axis=1)
    solution_2 = _not_negative(terms_S2)
    error_S = terms_S2 @ solution_2 - 1
    return LineFit(
        alpha_s=float(solution_2[0]),
        per_unit_s=float(solution_2[1] / largest),
        residual=float(np.sqrt(np.mean(error_S**2))),
        samples=kept,
    )


def _not_negative(terms_S2: Floats) -> Floats:
    """The least squares solution of terms @ x = 1 with both entries of x at least 0."""
    found_2: Floats = np.linalg.lstsq(terms_S2, np.ones(len(terms_S2)), rcond=None)[0]
    if found_2.min() >= 0:
        return found_2
    # With two unknowns the other one is then positive: all terms are.
    kept = int(np.argmax(found_2))
    column_S = terms_S2[:, kept]
    alone_2 = np.zeros(2)
    alone_2[kept] = column_S.sum() / (column_S @ column_S)
    return alone_2
