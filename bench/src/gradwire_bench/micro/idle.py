"""The scheduler's cost in a step that has nothing to hide: tiny gradients, 100 ms of compute.

The same waiting model (``schedule/replay.py``) takes steps with gradwire and without, in turn. A
device that computes leaves the processor free, so the runtime's work there shows in a step's time
only where the device has to wait for it; ``processor_s`` counts all of that work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any

from gradwire.cli.report.table import Row
from gradwire.contract.registry import load, names
from gradwire.errors import UnknownName, invalid
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire_bench.testbed.hosts import Testbed, open_hosts
from gradwire_bench.testbed.ranks import Report, run_ranks

from .idle_rank import PLAIN

NUM_LAYERS = 50
NUMEL = 64
STEP_S = 0.1


@dataclass(frozen=True, kw_only=True)
class IdleBench:
    """The settings of a measurement: ``turns`` of ``iterations`` steps of each planner and none."""

    planners: tuple[str, ...]
    hosts: int = 1
    rate_bytes_per_s: float = 1.25e9
    turns: int = 5
    iterations: int = 10

    def __post_init__(self) -> None:
        for name in ("hosts", "turns", "iterations"):
            if getattr(self, name) < 1:
                raise invalid(name, getattr(self, name), "at least 1", "leave it out")
        for planner in self.planners:
            if planner not in names("planner"):
                raise UnknownName("planner", planner, names("planner"))


def idle_profile() -> Profile:
    """50 layers of 64 elements, a third of 100 ms of them forward, the rest backward."""
    layers = tuple(
        Layer(
            name=f"layer{i}",
            tensors=(ProfiledTensor(name=f"layer{i}.weight", shape=(NUMEL,)),),
            forward_s=STEP_S / 3 / NUM_LAYERS,
            backward_s=STEP_S * 2 / 3 / NUM_LAYERS,
        )
        for i in range(NUM_LAYERS)
    )
    return Profile(model="idle", source="made up: nothing to hide", batch_size=1, layers=layers)


def run(bench: IdleBench, report: Report, *, timeout_s: float = 900.0) -> list[Row]:
    """A row without gradwire, then one for each planner; a step's time is its slowest rank's.

    ``fraction_overhead`` compares medians of turns that followed each other; rows have its median
    and its spread over the turns.
    """
    profile = idle_profile()
    # Plans are made for the paper's cluster, whatever carries them out here.
    cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    plans = {name: load("planner", name)(profile, cluster).to_json() for name in bench.planners}
    settings = {
        "profile": profile.to_json(),
        "plans": plans,
        "turns": bench.turns,
        "iterations": bench.iterations,
    }
    testbed = Testbed(hosts=bench.hosts, rate_bytes_per_s=bench.rate_bytes_per_s)
    with open_hosts(testbed) as hosts:
        results = run_ranks(hosts, f"{__name__}_rank", settings, report=report, timeout_s=timeout_s)
    plain = _turns_s([result[PLAIN] for result in results])
    return [_row(bench, name, plain, [result[name] for result in results]) for name in results[0]]


def _turns_s(ranks: Sequence[dict[str, Any]]) -> list[list[float]]:
    """The seconds of each turn's steps on the slowest rank."""
    turns = zip(*(rank["seconds"] for rank in ranks), strict=True)
    return [[max(step) for step in zip(*turn, strict=True)] for turn in turns]


def _row(
    bench: IdleBench, name: str, plain: list[list[float]], ranks: Sequence[dict[str, Any]]
) -> Row:
    turns = _turns_s(ranks)
    steps = [step for turn in turns for step in turn]
    overheads = [median(own) / median(base) - 1 for own, base in zip(turns, plain, strict=True)]
    return {
        "name": name,
        "num_hosts": bench.hosts,
        "step_s": median(steps),
        **_spread("step_", "_s", steps),
        "fraction_overhead": median(overheads),
        **_spread("fraction_overhead_", "", overheads),
        "processor_s": mean(turn for rank in ranks for turn in rank["processor_s"]),
    }


def _spread(before: str, after: str, figures: Sequence[float]) -> dict[str, object]:
    """The 20th and the 80th percentile of ``figures``, by key."""
    several = figures if len(figures) > 1 else [*figures, *figures]
    low, *_, high = quantiles(several, n=5, method="inclusive")
    return {f"{before}p20{after}": low, f"{before}p80{after}": high}
