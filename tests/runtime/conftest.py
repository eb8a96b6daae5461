"""Pools of ranks, shared by all tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Ranks


def _pool(world: int) -> Iterator[Ranks]:
    ranks = Ranks(world)
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.fixture(scope="session")
def one() -> Iterator[Ranks]:
    """A process that is alone in its group."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    yield from _pool(4)


@pytest.fixture(scope="module")
def late_two() -> Iterator[Ranks]:
    """Ranks of their own for the tests of a file, as the device ``late`` stays in processes."""
    yield from _pool(2)


@pytest.fixture
def pools(two: Ranks, four: Ranks) -> dict[int, Ranks]:
    return {2: two, 4: four}


@pytest.fixture
def doomed() -> Iterator[Ranks]:
    """Four ranks for one test that will not leave them whole."""
    yield from _pool(4)


@pytest.fixture
def doomed_two() -> Iterator[Ranks]:
    """Two ranks for one test that will not leave them whole."""
    yield from _pool(2)
