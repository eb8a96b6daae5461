"""Nothing is divided by what may be nothing: slopes, latencies, seconds, bytes, other ranks."""

from __future__ import annotations

import math
from itertools import product

import pytest

from gradwire.contract.registry import load, names
from gradwire.planning.buckets import buckets
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.fusion import NOTHING
from gradwire.planning.phases import Instance, UnequalBlock
from gradwire.planning.planner.usbyte import usbyte
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.timeline import simulate
from gradwire_bench.cli.simulate import ModelOnCluster
from gradwire_lab.cli.plan import message_rows
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.laws.planners import Planner
from gradwire_lab.planning.explain import alternatives, explain
from tests.each import each
from tests.laws.cases import name_of
from tests.planning.profiles import CODECS as MEASURED

ROUNDING = 1e-9
CODECS = dict.fromkeys(MEASURED, CodecFit(encode=NOTHING, decode=NOTHING, merge=NOTHING))


def _measured(alpha_s: float, per_unit_s: float, **more: tuple[tuple[int, float], ...]) -> Cluster:
    line = LineFit(alpha_s=alpha_s, per_unit_s=per_unit_s, **more)
    lines = {"all_reduce": line, "all_gather": line, "send": line}
    return Cluster(num_ranks=2, rate_bytes_per_s=1e6, collectives=lines, codecs=CODECS)


CLUSTERS = {
    "latency alone": _measured(0.5, 0.0),
    "bytes alone": _measured(0.0, 1e-6),
    "free": _measured(0.0, 0.0),
    "sizes all alike": _measured(0.5, 1e-6, samples=((64, 0.5), (64, 0.6))),
    "one rank": Cluster(num_ranks=1, rate_bytes_per_s=1e6),
    "no hop": Cluster(num_ranks=3, rate_bytes_per_s=1e6, hop_s=0.0, codecs=CODECS),
}
PROFILES = {
    "usual": profile_of(([64], 0.1, 0.2), ([8, 0], 0.1, 0.3), ([900], 0.2, 0.4)),
    "no bytes": profile_of(([], 0.1, 0.2), ([0], 0.1, 0.3)),
    "no time": profile_of(([64], 0.0, 0.0), ([900], 0.0, 0.0)),
    "neither": profile_of(([], 0.0, 0.0)),
}


PLANNERS = [load("planner", name) for name in names("planner")]
EVERYWHERE = list(product(PROFILES, CLUSTERS))


@pytest.mark.parametrize("planner", PLANNERS, ids=name_of)
def test_plans_are_made_priced_and_explained(planner: Planner, subtests: pytest.Subtests) -> None:
    """Each is priced; every second one is played and explained, the others for the next planner."""
    for place, (on, at) in enumerate(EVERYWHERE, PLANNERS.index(planner)):
        with subtests.test(profile=on, cluster=at):
            profile, cluster = PROFILES[on], CLUSTERS[at]
            plan = planner(profile, cluster)
            assert math.isfinite(iteration_s(plan, profile, cluster))
            if place % 2:
                assert simulate(plan, profile, cluster, ranks="all").iteration_s >= 0
                assert all(isinstance(one, str) for one in explain(plan, profile, cluster))
                for row in message_rows(plan, profile, cluster):
                    assert 0 <= float(str(row["fraction_hidden"])) <= 1 + ROUNDING


@each("on, at", EVERYWHERE)
def test_plans_of_all_planners_stand_side_by_side_with_their_figures(on: str, at: str) -> None:
    profile, cluster = PROFILES[on], CLUSTERS[at]
    for row in alternatives(usbyte(profile, cluster), profile, cluster):
        assert float(str(row["speedup_vs_wfbp"])) > 0
    case = ModelOnCluster(profile, cluster)
    case.run(names("planner"), tune=False)
    for row in case.rows():
        assert 0 <= float(str(row["fraction_of_ideal"])) <= 1 + ROUNDING
        assert 0 <= float(str(row["speedup_vs_one_rank"])) <= cluster.num_ranks * (1 + ROUNDING)
        if row["simulated_s"] == 0:
            assert row["samples_per_second"] == math.inf


def test_in_a_gap_shorter_than_the_latency_one_block_is_sent() -> None:
    """Equations 4 to 7, where a byte costs nothing: the gap is 0.25 s and the latency 0.5 s."""
    profile = profile_of(([4], 1.0, 0.25), ([64], 1.0, 0.25), ([64], 1.0, 0.25))
    cluster = CLUSTERS["latency alone"]
    blocks = Instance.of(profile, cluster, buckets(profile), 16).blocks([0, 1, 2])
    assert blocks[0] == UnequalBlock(bucket=2, first_basic=0, num_basic=1, start_s=0.25, end_s=0.75)
    # Layer 0's own message is the one that nothing hides: from 0.75 s on, when it is ready.
    plan = usbyte(profile, cluster, basic_partition_bytes=16)
    assert iteration_s(plan, profile, cluster) == 1.25 + 3.0


def test_what_other_rates_would_give_is_not_told_without_a_slope() -> None:
    profile, cluster = PROFILES["usual"], CLUSTERS["latency alone"]
    told = explain(usbyte(profile, cluster), profile, cluster)
    assert told[-1].startswith("What it gains at other rates is not told")
