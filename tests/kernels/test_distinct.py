"""The size of a union of index lists: the C++ against its definition, and lists that mislead it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.errors import InvalidSetting
from gradwire.kernels.distinct import count_distinct
from gradwire.kernels.libraries import reference_only
from tests.each import each
from tests.kernels.vectors import compiled, num_threads

__all__ = ["compiled"]
PLACES = (1, 63, 64, 65, 2**18 - 1, 2**18, 2**18 + 1, 600_000)


def drawn(num_places: int, density: float, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.rand(num_places, generator=random) < density).nonzero().flatten().int()


@pytest.mark.usefixtures("compiled")
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    num_places=st.sampled_from(PLACES),
    densities=st.lists(st.sampled_from([0.0, 0.0001, 0.01, 0.5, 1.0]), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_as_many_places_as_there_are(num_places: int, densities: list[float], seed: int) -> None:
    lists = [drawn(num_places, density, seed + i) for i, density in enumerate(densities)]
    named_N = torch.zeros(num_places, dtype=torch.bool)
    for indices_K in lists:
        named_N[indices_K.long()] = True
    want = int(named_N.sum())
    for threads in (1, 2):
        with num_threads(threads):
            assert count_distinct(lists, num_places) == want
    with reference_only():
        assert count_distinct(lists, num_places) == want


@pytest.mark.usefixtures("compiled")
@each(
    "places",
    [[3, 1], [1, 1, 2], [300_000, 2], [2, 300_000, 5], [300_000, 300_001, 1, 2], [0] * 70],
    ids=str,
)
def test_a_list_that_does_not_ascend_is_counted_all_the_same(places: list[int]) -> None:
    lists = [torch.tensor(places).int(), torch.tensor([1, 400_000]).int()]
    assert count_distinct(lists, 600_000) == len({*places, 1, 400_000})


@pytest.mark.usefixtures("compiled")
@each("place", [-1, 100, 2**31 - 1])
def test_an_index_outside_is_refused(place: int) -> None:
    outside = torch.tensor([place]).int()
    with pytest.raises(InvalidSetting, match=r"\[0, 100\)"):
        count_distinct([torch.tensor([5]).int(), outside], 100)
