"""Curves of lines at many sizes have the bits of one size at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning.data.fit import LineFit
from gradwire_lab.planning.curves import measured_each
from tests.strategies import bounded

SECONDS = st.floats(0, 100, allow_subnormal=False)
SIZES = st.integers(1, 2**30)


@bounded(100)
@given(
    samples=st.lists(st.tuples(SIZES, SECONDS), max_size=7),
    sizes=st.lists(st.floats(0.5, 2.0**31), min_size=1),
    alpha_s=SECONDS,
)
def test_many_sizes_have_the_bits_of_each(
    samples: list[tuple[int, float]], sizes: list[float], alpha_s: float
) -> None:
    line = LineFit(alpha_s=alpha_s, per_unit_s=1e-9, samples=tuple(samples))
    every = [*sizes, *(float(size) for size, _ in samples)]
    one_by_one = [line.measured_s(size) for size in every]
    assert measured_each(line, np.array(every)).tolist() == one_by_one
