"""Where a step's time goes by method, on real ranks: DEFT's figure 7, for any task and
methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from gradwire.errors import invalid
from gradwire_bench.testbed.hosts import Testbed, open_hosts
from gradwire_bench.testbed.ranks import Report, run_ranks

from ..frame import Row
from .breakdown_rank import PARTS

_NUM_ALONE = 4
"""The first parts: forward, backward, norms and selection, which wait for no other
rank.
"""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The settings of a breakdown.

    ``task`` is a function of ``workloads.applications``, and ``sizes`` holds its
    arguments. ``methods`` holds files of ``compress/`` with their settings, by the
    names of rows.
    """

    task: str
    sizes: Mapping[str, Any]
    methods: Mapping[str, tuple[str, Mapping[str, Any]]]
    hosts: int = 4
    rate_bytes_per_s: float = 125_000_000.0
    num_steps: int = 10
    timeout_s: float = field(default=900.0, compare=False)

    def __post_init__(self) -> None:
        if self.hosts < 2:
            raise invalid(
                "hosts", self.hosts, "at least 2", "a single host sends nothing"
            )


def run(bench: Breakdown, report: Report) -> list[Row]:
    """A row for each method: means over steps of the parts' seconds on each step's
    slowest rank.

    The slowest rank is the one whose own work, up to the selection, takes longest.
    """
    settings = {
        "task": bench.task,
        "sizes": dict(bench.sizes),
        "methods": {
            title: [name, dict(own)] for title, (name, own) in bench.methods.items()
        },
        "num_steps": bench.num_steps,
    }
    testbed = Testbed(hosts=bench.hosts, rate_bytes_per_s=bench.rate_bytes_per_s)
    with open_hosts(testbed) as hosts:
        results = run_ranks(
            hosts,
            f"{__name__}_rank",
            settings,
            report=report,
            timeout_s=bench.timeout_s,
        )
        shaped = hosts.shaped
    head = {
        "num_hosts": bench.hosts,
        "link_bytes_per_s": bench.rate_bytes_per_s if shaped else None,
        "numel": results[0]["numel"],
    }
    return [
        {
            "name": title,
            **head,
            **parts_of([result["steps"][title] for result in results]),
        }
        for title in bench.methods
    ]


def parts_of(ranks: Sequence[Sequence[Sequence[float]]]) -> Row:
    """Means over steps, from seconds by rank, step and part."""
    slowest = [
        max(step, key=lambda parts: sum(parts[:_NUM_ALONE]))
        for step in zip(*ranks, strict=True)
    ]
    means = [mean(seconds) for seconds in zip(*slowest, strict=True)]
    row: Row = {
        f"{part}_s": seconds for part, seconds in zip(PARTS, means, strict=True)
    }
    return row | {"step_s": sum(means)}
