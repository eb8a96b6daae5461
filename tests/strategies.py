"""Gradients for property tests: hypothesis strategies, and the panel that is shipped,
as tensors.

Every run draws the same examples (``derandomize``), so a red test is red for everybody.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire_lab.laws import inputs
from gradwire_lab.laws.inputs import DTYPES, KINDS, make_gradient

WORLDS = tuple(
    world
    if world in (1, 2, 3, 5, 8, 13, 17)
    else pytest.param(world, marks=pytest.mark.slow)
    for world in range(1, 18)
)
"""Any number of ranks, for steps that send in rounds: powers of two and others, odd and
even.
"""
SIZES = (0, 1, 2, 5, 7, 8, 9, 63, 64, 65, 200)
"""Empty, one element, around one byte of bits, around a block of 64."""


def bounded(num_examples: int) -> settings:
    """The settings of every property test here: the same few examples on every run."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def gradients(
    kinds: tuple[str, ...] = KINDS, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> st.SearchStrategy[Tensor]:
    """Flat gradients of awkward sizes, contents, dtypes and strides."""
    return st.builds(
        make_gradient,
        st.sampled_from(kinds),
        st.sampled_from(SIZES),
        st.sampled_from(dtypes),
        st.integers(0, 2**16),
        strided=st.booleans(),
    )


def panel() -> tuple[Tensor, ...]:
    """The gradients of ``inputs.panel``: every kind, size class and dtype."""
    return tuple(made.grad() for made in inputs.panel())
