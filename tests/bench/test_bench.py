"""`gradwire bench`: kernels beside torch's own, and the partition."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.cli.conftest import Ended

Run = Callable[..., Ended]
KERNEL = ("bench", "kernel", "--only", "onebit", "--numel", "70000", "--rounds", "4", "--json")


def columns(ended: Ended) -> set[str]:
    assert ended.code == 0, ended.err
    return {key for row in json.loads(ended.out)["rows"] for key in row}


def test_kernels_stand_beside_torch(gradwire: Run) -> None:
    assert {"kernel_s", "eager_s", "speedup_vs_eager"} <= columns(gradwire(*KERNEL))


def test_the_partition_is_timed(gradwire: Run) -> None:
    words = ("partition", "--numel", "20000", "--hosts", "5", "--rounds", "4", "--json")
    assert {"kernel_s", "saved_s"} <= columns(gradwire("bench", *words))
