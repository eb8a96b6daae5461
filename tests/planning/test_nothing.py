"""Nothing is divided by what may be nothing: slopes, latencies, seconds, bytes, other
ranks.
"""

from __future__ import annotations

import math
from itertools import product

import pytest

from gradwire.contract.registry import names
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire_bench.cli.simulate import ModelOnCluster
from gradwire_lab.cli.plan import message_rows
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.usbyte import usbyte
from gradwire_lab.planning.explain import alternatives, explain
from gradwire_lab.planning.sparse_fusion import NOTHING
from tests.each import each
from tests.planning.profiles import CODECS as MEASURED

ROUNDING = 1e-9
CODECS = dict.fromkeys(
    MEASURED, CodecFit(encode=NOTHING, decode=NOTHING, merge=NOTHING)
)


def _measured(
    alpha_s: float, per_unit_s: float, **more: tuple[tuple[int, float], ...]
) -> Cluster:
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


PLACES = {
    *product(PROFILES, ("free", "one rank")),
    *product(("usual", "no time"), CLUSTERS),
}


@pytest.mark.slow
@each("on, at", sorted(PLACES))
def test_plans_of_all_planners_are_explained_side_by_side(on: str, at: str) -> None:
    profile, cluster = PROFILES[on], CLUSTERS[at]
    plan = usbyte(profile, cluster)
    assert all(isinstance(one, str) for one in explain(plan, profile, cluster))
    for row in message_rows(plan, profile, cluster):
        assert 0 <= float(str(row["fraction_hidden"])) <= 1 + ROUNDING
    for row in alternatives(plan, profile, cluster):
        assert float(str(row["speedup_vs_wfbp"])) > 0
    case = ModelOnCluster(profile, cluster)
    case.run(names("planner"), tune=False)
    for row in case.rows():
        assert 0 <= float(str(row["fraction_of_ideal"])) <= 1 + ROUNDING
        assert (
            0
            <= float(str(row["speedup_vs_one_rank"]))
            <= cluster.num_ranks * (1 + ROUNDING)
        )
        if row["simulated_s"] == 0:
            assert row["samples_per_second"] == math.inf


def test_what_other_rates_would_give_is_not_told_without_a_slope() -> None:
    profile, cluster = PROFILES["usual"], CLUSTERS["latency alone"]
    reported = explain(usbyte(profile, cluster), profile, cluster)
    assert reported[-1].startswith("What it gains at other rates is not told")
