"""Table 3 of HiPress: servers of their own beside aggregators that sit with workers.

The paper's evaluation has aggregators beside workers (section 6.1), "for their best
performance", and shows no other. Here both are simulated, by ``secopa`` with onebit:
the same hosts in other roles, and hosts that are added to serve.
"""

from __future__ import annotations

from itertools import product

from gradwire.planning.simulation.clock import Demand
from gradwire_lab.planner.secopa import secopa
from gradwire_lab.planning.all_ranks import all_ranks

from ..frame import Ask, Claim, Findings, Row
from .setting import GBIT, LOCAL

MODELS = ("vgg19", "bert_base", "resnet50")
RATES_GBIT = (1.0, 10.0, 56.0)
HOSTS = 8
ROLES = ((8, 0), (7, 1), (6, 2), (4, 4), (8, 2), (8, 4), (8, 8))
"""Workers and servers; the first has aggregators beside its workers."""


def servers(ask: Ask) -> Findings:
    """Seconds of a step, and batches of all workers in a second.

    Quick: one model at one rate.
    """
    cases = list(product(MODELS, RATES_GBIT))
    if ask.quick:
        cases = cases[1:2]
    rows: list[Row] = []
    for number, (model, rate_gbit) in enumerate(cases):
        ask.report(number / len(cases), f"{model} at {rate_gbit:g} Gbit/s")
        rows += rows_of(model, rate_gbit)
    note = f"simulated hosts, planned by secopa; {HOSTS} hosts unless some are added"
    return Findings(tuple(rows), tuple(claims_of(rows)), (note,))


def rows_of(model: str, rate_gbit: float) -> list[Row]:
    """A row for each division of hosts into workers and servers."""
    profile = LOCAL.profile(model)
    rows: list[Row] = []
    for workers, serving in ROLES:
        cluster = LOCAL.cluster(workers + serving).model_copy(
            update={"rate_bytes_per_s": rate_gbit * GBIT}
        )
        plan = secopa(profile, cluster, servers=serving or None)
        demand = Demand.of(plan, profile, cluster)
        # servers have no backward pass
        timings = all_ranks(demand, [1.0] * workers + [0.0] * serving)
        step_s = max(timing.iteration_s for timing in timings[:workers])
        rows.append(
            {
                "name": f"{model}, {rate_gbit:g} Gbit/s, {workers} + {serving}",
                "hosts": workers + serving,
                "workers": workers,
                "servers": serving,
                "step_s": step_s,
                "batches_each_second": workers / step_s,
            }
        )
    return rows


def claims_of(rows: list[Row]) -> list[Claim]:
    """Whether aggregators beside workers are the best use of hosts."""
    size = len(ROLES)
    gains = []
    for first in range(0, len(rows), size):
        beside, *others = rows[first : first + size]
        best = max(_rate(row) for row in others if row["hosts"] == HOSTS)
        gains.append(best / _rate(beside))
    shown = f"the best other roles train at {min(gains):.2f} to {max(gains):.2f} of it"
    what = "hosts train fastest with aggregators beside workers"
    is_best = max(gains) < 1.0
    why = "" if is_best else "servers compute no gradient, and their links are free"
    return [Claim(what, "section 6.1", shown, is_best, why)]


def _rate(row: Row) -> float:
    return float(str(row["batches_each_second"]))
