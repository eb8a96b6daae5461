"""The seconds of every scheme of sparse synchronisation on shaped links, for given
index sets.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from gradwire.errors import UnknownName, invalid
from gradwire_bench.micro.sparse_rank import DENSE
from gradwire_bench.testbed.hosts import Testbed, open_hosts
from gradwire_bench.testbed.ranks import Report, run_ranks

from ..frame import Row
from .captured_rank import SCHEMES


@dataclass(frozen=True, kw_only=True)
class CapturedBench:
    """The settings of a measurement: the gradients of ``paths``, by each of
    ``schemes``.

    The dense scheme is always measured too.
    """

    paths: tuple[Path, ...]
    """Files that ``captured_rank.Units`` reads, with an index set for each host."""
    hosts: int = 16
    rate_bytes_per_s: float = 12_500_000.0
    repeats: int = 3
    schemes: tuple[str, ...] = SCHEMES

    def __post_init__(self) -> None:
        if self.hosts < 2:
            raise invalid(
                "hosts", self.hosts, "at least 2", "a single host sends nothing"
            )
        if self.repeats < 1:
            raise invalid("repeats", self.repeats, "at least 1", "leave it out")
        for name in self.schemes:
            if name not in SCHEMES:
                raise UnknownName("scheme", name, SCHEMES)


def run(
    bench: CapturedBench, report: Report, *, timeout_s: float = 1200.0
) -> list[Row]:
    """A row for each file and scheme; a step's time is that of its slowest rank.

    ``busiest_bytes`` counts the bytes in the busier direction of the busiest link, and
    the floor is this over the rate. Both are None where links are not shaped, as every
    rank then counts the bytes of all.
    """
    settings = {
        "paths": [str(path.resolve()) for path in bench.paths],
        "schemes": list(bench.schemes),
        "repeats": bench.repeats,
        "threads": max(1, len(os.sched_getaffinity(0)) // bench.hosts),
    }
    testbed = Testbed(hosts=bench.hosts, rate_bytes_per_s=bench.rate_bytes_per_s)
    with open_hosts(testbed) as hosts:
        results = run_ranks(
            hosts, f"{__name__}_rank", settings, report=report, timeout_s=timeout_s
        )
        shaped = hosts.shaped
    return [
        row
        for tensor in results[0]
        for row in _rows(bench, tensor, [result[tensor] for result in results], shaped)
    ]


def _rows(
    bench: CapturedBench, tensor: str, results: list[dict[str, Any]], shaped: bool
) -> list[Row]:
    """The rows of one gradient; ``results`` holds those of each rank."""
    slowest = {
        scheme: [max(turn) for turn in _turns(results, scheme, "seconds")]
        for scheme in results[0]["schemes"]
    }
    dense_s = median(slowest[DENSE])
    rows = []
    for scheme, seconds in slowest.items():
        busiest = _busiest_bytes(results, scheme) if shaped else None
        floor_s = busiest / bench.rate_bytes_per_s if busiest is not None else None
        rows.append(
            {
                "name": f"{tensor}, {scheme}",
                "tensor": tensor,
                "scheme": scheme,
                "num_hosts": bench.hosts,
                "link_bytes_per_s": bench.rate_bytes_per_s if shaped else None,
                "numel": results[0]["numel"],
                "fraction_density": mean(result["density"] for result in results),
                "step_s": median(seconds),
                "step_least_s": min(seconds),
                "step_most_s": max(seconds),
                "speedup_vs_dense": dense_s / median(seconds),
                "busiest_bytes": busiest,
                "floor_s": floor_s,
                "time_vs_floor": median(seconds) / floor_s if floor_s else None,
            }
        )
    return rows


def _turns(
    results: list[dict[str, Any]], scheme: str, key: str
) -> list[tuple[float, ...]]:
    """Every rank's figure in each repeat."""
    return list(
        zip(*(result["schemes"][scheme][key] for result in results), strict=True)
    )


def _busiest_bytes(results: list[dict[str, Any]], scheme: str) -> float:
    sides = [_turns(results, scheme, key) for key in ("sent_bytes", "received_bytes")]
    found: list[float] = [
        max(*sent, *received) for sent, received in zip(*sides, strict=True)
    ]
    return median(found)
