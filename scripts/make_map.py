"""Writes ``docs/map.js``: seconds of exchanges over distance, rate, size and ranks.

    python -m scripts.make_map

The page ``docs/map.md`` lets a reader move five sliders. A browser has no simulator. So
the closed form is asked on a grid, and the page interpolates between its points, in
logarithms of all axes. ``between`` does the same in Python, for the tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

from gradwire.planning.buckets import buckets, whole_buckets
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.planning.planner.auto.judgement import setting_of
from gradwire.planning.price import iteration_s

FILE = Path(__file__).resolve().parents[1] / "docs" / "map.js"
AXES: dict[str, tuple[float, ...]] = {
    "rate_mbit": (10, 30, 100, 300, 1000, 3000, 10000),
    "rtt_ms": (0.2, 1, 3, 7.99, 8, 20, 80, 300),
    "parameters": (1e5, 3e5, 1e6, 3e6, 1e7, 1e8, 1e9),
    "ranks": (2, 3, 4, 8, 16, 32),
}
"""The points of the grid. From 8 ms there and back on sums of all sizes go straight, so
seconds jump there."""
EXCHANGES = ("none", "uniform", "topk")
HOP_S = 1e-4
"""A message's own work."""


def profile_of(parameters: float) -> Profile:
    """A model of one matrix that computes nothing."""
    tensor = ProfiledTensor(name="weight", shape=(round(parameters),))
    layer = Layer(name="layer", tensors=(tensor,), forward_s=0.0, backward_s=0.0)
    return Profile(model="one matrix", source="stated", batch_size=1, layers=(layer,))


def exchange_s(
    exchange: str, rate_mbit: float, rtt_ms: float, parameters: float, ranks: float
) -> float:
    """The seconds of one exchange of all gradients, by the closed form.

    ``"ddp"`` is the ring of DDP on gloo: 2 (W - 1) hops, each with the distance.
    """
    cluster = Cluster(
        num_ranks=round(ranks),
        rate_bytes_per_s=rate_mbit * 1e6 / 8,
        hop_s=HOP_S,
        latency_s=rtt_ms / 2000,
    )
    if exchange == "ddp":
        hops = 2 * (cluster.num_ranks - 1)
        sent_bytes = hops / cluster.num_ranks * 4 * parameters
        return (
            hops * (HOP_S + cluster.latency_s) + sent_bytes / cluster.rate_bytes_per_s
        )
    profile = profile_of(parameters)
    message = whole_buckets(*buckets(profile))
    plan = Plan(
        planner="map",
        model=profile.model,
        messages=(message.model_copy(update={"exchange": exchange}),),
        exchanges={exchange: setting_of(exchange)},
    )
    return iteration_s(plan, profile, cluster)


def table() -> dict[str, Any]:
    """The axes, and the seconds of each exchange at each point of the grid.

    Points are in the order of ``itertools.product`` over the axes.
    """
    return {
        "axes": AXES,
        "seconds": {
            name: [
                float(f"{exchange_s(name, *point):.4g}")
                for point in product(*AXES.values())
            ]
            for name in ("ddp", *EXCHANGES)
        },
    }


def corners(
    axes: Sequence[Sequence[float]], point: Sequence[float]
) -> Iterator[tuple[int, float]]:
    """Places in a table around a point, each with its weight."""
    around = [(0, 1.0)]
    for axis, value in zip(axes, point, strict=True):
        above = next(
            (at for at, mark in enumerate(axis) if mark >= value), len(axis) - 1
        )
        at = max(1, above)
        low = log(axis[at - 1])
        share = (log(value) - low) / (log(axis[at]) - low)
        around = [
            (place * len(axis) + near, weight * part)
            for place, weight in around
            for near, part in ((at - 1, 1 - share), (at, share))
        ]
    yield from around


def between(found: dict[str, Any], exchange: str, point: Sequence[float]) -> float:
    """The seconds of an exchange between the points of a table."""
    seconds = found["seconds"][exchange]
    near = corners([*found["axes"].values()], point)
    return exp(sum(weight * log(seconds[place]) for place, weight in near))


def main() -> None:
    """Writes the file."""
    text = json.dumps(table(), separators=(",", ":"))
    FILE.write_text(f"const MAP = {text};\n", encoding="utf-8")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
