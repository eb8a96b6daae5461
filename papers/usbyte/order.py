"""Figure 13 of US-Byte: the second phase's order against random orders of the same
blocks.

Theorem 1 says that forward order is optimal. It is the earliest-due-date rule (Jackson,
1955): all blocks are there when the phase begins, one is sent at a time, and a layer's
due date is the end of the iteration less the forward computation from that layer on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.contract.registry import load
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.clock import run_on_clock
from gradwire_bench.report import bars

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .setting import MBIT, RANKS, cluster_1, profile_of

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]
ORDERS = 10_000
PIECE = 1000
WHY_THEOREM = (
    "under the model this is theorem 1, so no order could be faster; the paper "
    "measures its orders"
)
ROUNDING = 1e-9
"""The relative difference below which two iterations take equally long."""


@dataclass(frozen=True)
class SecondPhase:
    """The K blocks that are left to send when the backward pass has ended, for L
    layers.
    """

    start_s: float
    block_s_K: Floats
    layer_K: Ints
    ready_s_L: Floats
    """The second at which the backward pass and all of each layer's blocks of the first
    phase have ended.
    """
    rest_s_L: Floats
    """Forward seconds from each layer to the end."""

    @classmethod
    def of(cls, plan: Plan, profile: Profile, cluster: Cluster) -> SecondPhase:
        """Splits a plan of credit 1 whose messages are of one layer each."""
        assert plan.credit == 1, (
            "blocks that travel together have no duration of their own"
        )
        timing = run_on_clock(plan, profile, cluster)
        layer_of = {
            t.name: i for i, layer in enumerate(profile.layers) for t in layer.tensors
        }
        backward_s = timing.backward_end_s[0]
        ready_s_L = np.full(len(profile.layers), backward_s)
        block_s = []
        layers = []
        start_s = float("inf")
        for place, message in enumerate(plan.messages):
            layer = layer_of[message.chunks[0].tensor]
            begun_s = timing.message_start_s[place]
            ended_s = timing.message_end_s[place]
            if begun_s < backward_s:
                ready_s_L[layer] = max(ready_s_L[layer], ended_s)
                continue
            start_s = min(start_s, begun_s)
            block_s.append(ended_s - begun_s)
            layers.append(layer)
        forward_s_L = np.array([layer.forward_s for layer in profile.layers])
        return cls(
            start_s=start_s,
            block_s_K=np.array(block_s, dtype=np.float64),
            layer_K=np.array(layers, dtype=np.intp),
            ready_s_L=ready_s_L,
            rest_s_L=np.cumsum(forward_s_L[::-1])[::-1],
        )

    def iterations_s(self, orders_PK: Ints) -> Floats:
        """Seconds of an iteration for each of P orders of the blocks (equations 9 to
        12).

        Layers run one behind the other, so the end is the latest of (layer ready + the
        forward seconds from it on).
        """
        ends_PK = self.start_s + np.cumsum(self.block_s_K[orders_PK], axis=1)
        ready_PL = np.repeat(self.ready_s_L[None], len(orders_PK), axis=0)
        rows_P1 = np.arange(len(orders_PK))[:, None]
        np.maximum.at(ready_PL, (rows_P1, self.layer_K[orders_PK]), ends_PK)
        found_P: Floats = (ready_PL + self.rest_s_L).max(axis=1)
        return found_P


def figure13(
    ask: Ask, models: Sequence[str] = ("resnet50", "vgg16"), orders: int | None = None
) -> Findings:
    """Sequential order and random orders of the blocks of one plan, 8 nodes of cluster
    1.
    """
    orders = orders or (ORDERS // 20 if ask.quick else ORDERS)
    rows = []
    for done, model in ask.each(models):
        ask.report(done, model)
        rows.append(_row(model, orders))
    note = (
        "many orders are as fast as the sequential one under the model, where "
        "the paper's measured "
        "ones are all slower: the model knows ties, a measurement does not"
    )
    return Findings(tuple(rows), (claim_of(rows, orders),), (note,))


def claim_of(rows: Sequence[Row], orders: int) -> Claim:
    """Whether no order is faster, which the model cannot confirm."""
    agrees = False if any(number(row, "num_faster") for row in rows) else None
    return Claim(
        f"of {ORDERS} random orders of the second phase none trains faster than "
        "the sequential one",
        "section 6.3, figure 13",
        "; ".join(
            f"{row['model']}: {row['num_faster']} of {orders} are faster"
            for row in rows
        ),
        agrees,
        "" if agrees is False else WHY_THEOREM,
    )


def _row(model: str, orders: int) -> Row:
    profile = profile_of(model)
    cluster = cluster_1(RANKS)
    plan = load("planner", "usbyte")(profile, cluster, basic_partition_bytes=4 * MBIT)
    phase = SecondPhase.of(plan, profile, cluster)
    num_blocks = len(phase.block_s_K)
    sequential_s = float(
        phase.iterations_s(np.argsort(phase.layer_K, kind="stable")[None])[0]
    )
    draw = np.random.default_rng(0)
    pieces = [
        phase.iterations_s(
            draw.permuted(np.tile(np.arange(num_blocks), (num, 1)), axis=1)
        )
        for num in [PIECE] * (orders // PIECE) + [orders % PIECE]
        if num
    ]
    random_s_P = np.concatenate(pieces)
    samples = RANKS * profile.batch_size
    return {
        "name": f"{model}, {num_blocks} blocks",
        "model": model,
        "num_orders": orders,
        "num_blocks": num_blocks,
        "samples_per_s_sequential": samples / sequential_s,
        "samples_per_s_random_best": samples / float(random_s_P.min()),
        "samples_per_s_random_median": samples / float(np.median(random_s_P)),
        "samples_per_s_random_worst": samples / float(random_s_P.max()),
        "num_faster": int((random_s_P < sequential_s * (1 - ROUNDING)).sum()),
        "fraction_as_fast": float(
            (np.abs(random_s_P / sequential_s - 1) <= ROUNDING).mean()
        ),
    }


def draw13(rows: Sequence[Row], path: Path) -> Path:
    """Draws bars of the speeds of the sequential order and of random orders."""
    keys = ("sequential", "random_best", "random_median", "random_worst")
    drawn = [
        {
            "name": f"{row['model']} {key.replace('_', ' ')}",
            "speed": row[f"samples_per_s_{key}"],
        }
        for row in rows
        for key in keys
    ]
    notes = {"speed": "samples a second (more is better)"}
    return bars.draw(
        drawn, path, keys=["speed"], title="Order of the second phase", notes=notes
    )
