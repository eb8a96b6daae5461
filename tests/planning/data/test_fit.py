"""The fit finds what times were made of."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import InvalidSetting
from gradwire.planning.data.fit import LineFit, fit_line
from tests.each import each

SIZES = (4 * 2**10, 32 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6))
def test_the_fit_finds_what_exact_times_were_made_of(
    alpha_s: float, slope: float
) -> None:
    found = fit_line((size, alpha_s + slope * size) for size in SIZES)
    assert math.isclose(found.per_unit_s, slope, rel_tol=1e-6)
    assert math.isclose(found.alpha_s, alpha_s, rel_tol=1e-6)
    assert found.residual < 1e-6
    assert found.seconds(10**6) == found.alpha_s + found.per_unit_s * 10**6


@each(
    "samples, expected",
    [
        # Falls with the size: no slope; and steeper than through the origin: no alpha.
        ([(10, 2.0), (20, 1.0), (30, 1.0)], (None, 0.0)),
        ([(10, 1.0), (20, 4.0), (30, 9.0)], (0.0, None)),
    ],
)
def test_no_term_is_negative(
    samples: list[tuple[int, float]], expected: tuple[float | None, float | None]
) -> None:
    found = fit_line(samples)
    for value, wanted in zip((found.alpha_s, found.per_unit_s), expected, strict=True):
        assert value > 0 if wanted is None else value == wanted
    # The term that is left is the best one of its own: any other has a larger relative
    # error.
    for factor in (0.99, 1.01):
        other = found.model_copy(
            update={
                "alpha_s": found.alpha_s * factor,
                "per_unit_s": found.per_unit_s * factor,
            }
        )
        assert _relative_error(found, samples) < _relative_error(other, samples)


def _relative_error(line: LineFit, samples: list[tuple[int, float]]) -> float:
    return sum((line.seconds(size) / seconds - 1) ** 2 for size, seconds in samples)


@each(
    "samples",
    [
        [],
        [(8, 1.0)],
        [(8, 1.0), (9, 2.0)],
        [(8, 1.0), (8, 2.0), (8, 3.0)],
        [(8, 0.0), (9, 1.0), (10, 1.0)],
        [(8, math.nan), (9, 1.0), (10, 1.0)],
        [(8, math.inf), (9, 1.0), (10, 1.0)],
        [(-8, 1.0), (9, 1.0), (10, 1.0)],
    ],
)
def test_what_determines_no_line_is_refused(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(InvalidSetting, match="measure more sizes"):
        fit_line(samples)


@each("size", [0, 64])
def test_samples_of_one_size_tell_no_slope(size: int) -> None:
    line = LineFit(alpha_s=1.0, per_unit_s=0.5, samples=((size, 2.0), (size, 3.0)))
    assert line.tail_s == 0.5
    assert line.parts(2 * size + 2)[1] == 0.5 * (2 * size + 2)


def test_noise_ends_in_the_residual() -> None:
    noise = random.Random(0)
    found = fit_line(
        (size, (1e-4 + 1e-8 * size) * noise.uniform(0.9, 1.1))
        for size in SIZES
        for _ in range(50)
    )
    # Uniform in +-10 % has a standard deviation of 10 % / sqrt(3).
    assert found.residual == pytest.approx(0.1 / math.sqrt(3), rel=0.1)
    assert found.alpha_s == pytest.approx(1e-4, rel=0.03)
    assert found.per_unit_s == pytest.approx(1e-8, rel=0.03)
