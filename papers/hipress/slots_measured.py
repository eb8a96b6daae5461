"""Section 3.2 of HiPress on real ranks: a coordinator, static turns, and neither.

Shaped hosts replay a model whose layers are waits: links, bytes, compressor and runtime
are real. Ways and plans are those of the simulated figure (``coordinator.py``). Bytes
and seconds are scaled, so that two cores can carry 8 hosts: a step takes 3 to 5 s. All
models have the same links. This module is also the program of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.contract.units import format_rate
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire_bench.schedule.replay import scaled_profile
from gradwire_bench.schedule.schedule import BURST_S, CONGESTION_CONTROL
from gradwire_bench.schedule.schedule_rank import replay
from gradwire_bench.schedule.sharing import keep_queues_short, share_cores
from gradwire_bench.testbed.hosts import Testbed, shaped_hosts
from gradwire_bench.testbed.ranks import Report, part_of, run_ranks

from ..frame import Ask, Claim, Findings, Row
from .coordinator import (
    COORDINATED,
    RANKS,
    RULES,
    SPREADS,
    STATIC,
    coordinated,
    static_figures,
)
from .coordinator import plans_of as plans_without
from .setting import GBIT, LOCAL


class Case(NamedTuple):
    """A model, and how it is replayed."""

    model: str
    collective: str
    scale: float
    """The model's bytes over those that are replayed."""
    slowdown: float
    """The seconds that are replayed over the model's."""


CASES = (
    Case("resnet50", "casync_ps", scale=4.0, slowdown=4.0),
    Case("bert_base", "casync_ring", scale=16.0, slowdown=1.0),
    Case("ugatit", "casync_ps", scale=64.0, slowdown=0.25),
)
RATE_BYTES_PER_S = 0.1 * GBIT
SLOWER_LINKS = 16.0
"""The scale times the slowdown of each case."""


def slots_measured(
    ask: Ask, cases: Sequence[Case] = CASES, num_hosts: int = RANKS
) -> Findings:
    """Seconds of a step, sends and bytes; quick: in one turn."""
    link = RATE_BYTES_PER_S / SLOWER_LINKS
    testbed = Testbed(
        hosts=num_hosts,
        rate_bytes_per_s=link,
        burst_s=BURST_S,
        congestion_control=CONGESTION_CONTROL,
    )
    settings = {"cases": cases, "link": link, "turns": 1 if ask.quick else 2}
    with shaped_hosts(testbed) as hosts:
        results = run_ranks(
            hosts, __name__, settings, report=ask.report, timeout_s=3600
        )
    rows: list[Row] = []
    for case, spread in product(cases, SPREADS):
        key = f"{case.model} {spread:g}"
        rows += rows_of(case, spread, [result[key] for result in results])
    scales = ", ".join(
        f"{case.model} 1/{case.scale:g} of the bytes and {case.slowdown:g} times the "
        "seconds"
        for case in cases
    )
    note = (
        f"{testbed.hosts} shaped hosts at {format_rate(RATE_BYTES_PER_S)}: {scales}; "
        "bytes are counted on the links, and what is told is compared with the model's"
    )
    return Findings(tuple(rows), tuple(claims_of(rows)), (note,))


def rows_of(case: Case, spread: float, ranks: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each way; a step ends on the rank that ends last."""
    profile = profile_of_rank(case, 0, spread, 1)
    cluster = LOCAL.cluster(len(ranks))
    rows: list[Row] = []
    for way, plan in plans_of(profile, case).items():
        own = [rank[way] for rank in ranks]
        steps = zip(*(one["iterations"] for one in own), strict=True)
        step_s = median(
            max(end for _, end in one) - max(start for start, _ in one) for one in steps
        )
        sends = sum(one["batches"] for one in own)
        if plan.bulk is None:
            sends = static_figures(plan, profile, cluster, ())["sends"]
        link_bytes = sum(median(one["sent_bytes"]) for one in own)
        told_bytes = sum(one["told_bytes"] for one in own)
        rows.append(
            {
                "name": f"{case.model} {case.collective}, {100 * spread:g} % apart, "
                f"{way}",
                "model": case.model,
                "way": way,
                "uneven_percent": 100 * spread,
                "step_s": step_s / case.slowdown,
                "sends": round(sends),
                "link_bytes": round(link_bytes),
                # as many rows tell of all bytes as of those that are replayed
                "told_percent": 100 * told_bytes / (case.scale * link_bytes),
            }
        )
    return rows


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    """Whether the coordinator is as fast as static turns, on even and uneven ranks."""
    claims = []
    for spread in SPREADS:
        own = [row for row in rows if row["uneven_percent"] == 100 * spread]
        ratios = []
        for static in own:
            if static["way"] == STATIC:
                times = [
                    float(str(row["step_s"]))
                    for row in own
                    if row["model"] == static["model"]
                    and str(row["way"]).startswith(COORDINATED)
                ]
                ratios.append(min(times) / float(str(static["step_s"])))
        is_faster = max(ratios) <= 1.0
        what = f"ranks {100 * spread:g} % apart: no step is slower than by static turns"
        shown = f"{min(ratios):.2f} to {max(ratios):.2f} of the seconds"
        why = "" if is_faster else "what it is told and tells takes two latencies more"
        claims.append(Claim(what, "section 3.2", shown, is_faster, why))
    told = max(float(str(row["told_percent"])) for row in rows)
    what = "the coordinator's load is light: below 1 % of bytes"
    shown = f"at most {told:.2f} %"
    why = "" if told < 1.0 else "tensors are small, and each is told by itself"
    claims.append(Claim(what, "section 4.1", shown, told < 1.0, why))
    return claims


def plans_of(profile: Profile, case: Case) -> dict[str, Plan]:
    """The plan of each way, for a scaled profile."""
    plans = plans_without(profile, case.collective, scale=case.scale)
    for rules in RULES:
        name = f"{COORDINATED}, {rules.ahead} ahead"
        plans[name] = coordinated(profile, case.collective, rules)
    return plans


def profile_of_rank(case: Case, rank: int, spread: float, world: int) -> Profile:
    """The scaled profile of a rank, whose backward pass may take longer."""
    profile = LOCAL.profile(case.model)
    small = scaled_profile(profile, scale=case.scale, slowdown=case.slowdown)
    factor = 1.0 + spread * rank / max(1, world - 1)
    layers = tuple(
        layer.model_copy(update={"backward_s": factor * layer.backward_s})
        for layer in small.layers
    )
    return small.model_copy(update={"layers": layers})


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """This rank's iterations, bytes and batches of every model and spread."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    world = dist.get_world_size()
    share_cores(rank, world)
    keep_queues_short(settings["link"])
    cases = list(product(settings["cases"], SPREADS))
    found: dict[str, Any] = {}
    for place, (fields, spread) in enumerate(cases):
        case = Case(*fields)
        within = part_of(report, place, len(cases), f"{case.model}: ")
        small = profile_of_rank(case, rank, spread, world)
        plans = plans_of(small, case)
        runs = replay(small, plans, settings["turns"], 2, within)
        found[f"{case.model} {spread:g}"] = {
            way: {
                "iterations": run.iterations,
                "sent_bytes": run.sent_bytes,
                "batches": run.num_batches,
                "told_bytes": run.told_bytes,
            }
            for way, run in runs.items()
        }
    return found
