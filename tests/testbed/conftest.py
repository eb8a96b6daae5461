"""Tests marked ``netns`` run wherever shaped hosts can really be made, and say why elsewhere."""

from __future__ import annotations

import functools

import pytest

from gradwire.testbed.hosts import Availability, available

_availability = functools.cache(available)


@pytest.fixture(autouse=True)
def shaping(request: pytest.FixtureRequest) -> Availability | None:
    if request.node.get_closest_marker("netns") is None:
        return None
    found = _availability()
    if not found:
        pytest.skip(found.reason)
    return found
