"""Pools of ranks, shared by all tests; ``tests/conftest.py`` has these fixtures for all
folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

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
    """Ranks of their own for the tests of a file, as the device ``late`` stays in
    processes.
    """
    yield from _pool(2)


@pytest.fixture
def pools(two: Ranks, four: Ranks) -> dict[int, Ranks]:
    return {2: two, 4: four}


@pytest.fixture
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Starts any number of ranks for one test that will not leave them whole."""
    with ExitStack() as stack:

        def start(world: int) -> Ranks:
            ranks = Ranks(world)
            stack.callback(ranks.close)
            return ranks

        yield start


@pytest.fixture
def doomed(ranks_of: Callable[[int], Ranks]) -> Ranks:
    """Four ranks for one test that will not leave them whole."""
    return ranks_of(4)


@pytest.fixture
def doomed_two(ranks_of: Callable[[int], Ranks]) -> Ranks:
    """Two ranks for one test that will not leave them whole."""
    return ranks_of(2)
