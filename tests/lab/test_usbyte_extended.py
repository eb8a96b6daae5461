"""usbyte_extended: never longer than usbyte, and shorter where layers are small."""

from __future__ import annotations

import random

import pytest

from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.usbyte import usbyte
from gradwire_lab.planner.usbyte_extended import usbyte_extended
from tests.each import each
from tests.planning.profiles import (
    exact_cluster,
    random_instance,
)


@each("credit", [1, 4])
def test_the_extensions_never_make_it_longer_and_sometimes_much_shorter(
    credit: int,
) -> None:
    draw = random.Random(11)
    gains = []
    for _ in range(30):
        profile, cluster, basic_bytes = random_instance(draw, draw.randint(1, 10))
        papers = usbyte(profile, cluster, basic_partition_bytes=basic_bytes)
        extended = usbyte_extended(
            profile, cluster, basic_partition_bytes=basic_bytes, credit=credit
        )
        gains.append(
            iteration_s(papers, profile, cluster)
            / iteration_s(extended, profile, cluster)
        )
    assert min(gains) >= 1
    assert max(gains) > 1.5


@pytest.mark.smoke
def test_merging_joins_small_neighbours_only() -> None:
    """alpha is 1 s and a byte takes 1/64: below 8 times 64 bytes everything is
    merged.
    """
    small = [([4], 0.125, 0.125)] * 6
    profile = profile_of(*small, ([1024], 0.125, 0.125), *small)
    cluster = exact_cluster(hop_s=0.5, rate=64.0)
    plan = usbyte_extended(profile, cluster, basic_partition_bytes=2**20, credit=1)
    assert sorted(len(message.chunks) for message in plan.messages) == [1, 6, 6]
    assert len(usbyte(profile, cluster, basic_partition_bytes=2**20).messages) == 13
