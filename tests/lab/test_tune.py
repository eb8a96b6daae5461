"""tune: never worse than the defaults, the same for a seed, quiet, and clear about its
mistakes.
"""

from __future__ import annotations

import inspect
import random
import sys

import pytest

from gradwire.contract.registry import load, names
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner_settings import settings_of
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.bytescheduler import bytescheduler
from gradwire_lab.planning.tune import search_space, tune
from tests.each import each
from tests.planning.profiles import exact_cluster, random_instance

EIGHT = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
SMALL = profile_of(*[([2**18 << place], 2e-3, 4e-3) for place in range(5)])
"""Layers of 1 to 16 MiB."""


@pytest.mark.smoke
@each("name", names("planner"))
def test_search_holds_settings_and_their_defaults(name: str) -> None:
    planner = load("planner", name)
    space = search_space(planner)
    assert set(space) <= set(settings_of(planner) or ())
    for setting, values in space.items():
        default = inspect.signature(planner).parameters[setting].default
        assert values.low <= default <= values.high


@each(
    "name", sorted({*names("planner")} - {"secopa"})
)  # each try of which takes seconds
def test_tuned_is_never_worse_than_the_defaults(name: str) -> None:
    profile, cluster, _ = random_instance(random.Random(5), 6)
    tuned = tune(name, profile, cluster, trials=6)
    default = load("planner", name)(profile, cluster)
    assert iteration_s(tuned, profile, cluster) <= iteration_s(
        default, profile, cluster
    )


def test_the_search_finds_what_the_defaults_miss() -> None:
    """Cut into blocks of 4 MiB, a layer of 64 MiB pays a dear latency eight times
    over.
    """
    profile = profile_of(([2**20], 0.5, 0.5), ([2**24], 0.5, 0.5))
    cluster = exact_cluster(hop_s=2**-3, rate=2.0**28)
    default = bytescheduler(profile, cluster)
    tuned = tune("bytescheduler", profile, cluster)
    gained = iteration_s(default, profile, cluster) / iteration_s(
        tuned, profile, cluster
    )
    assert gained > 1.1
    assert len(tuned.messages) < len(default.messages)


def test_the_same_seed_gives_the_same_plan_and_others_try_other_settings() -> None:
    tried: list[list[object]] = []

    def recorded(plan: Plan) -> float:
        tried[-1].append(plan.settings)
        return iteration_s(plan, SMALL, EIGHT)

    plans = []
    for seed in (3, 3, 4):
        tried.append([])
        found = tune(
            "bytescheduler", SMALL, EIGHT, objective=recorded, trials=12, seed=seed
        )
        plans.append(found)
    assert plans[0] == plans[1]
    assert tried[0] == tried[1] != tried[2]
    assert tried[0][0] == bytescheduler(SMALL, EIGHT).settings


def test_a_planner_without_search_is_its_plan_and_needs_no_optuna(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(profile: Profile, cluster: Cluster) -> Plan:
        return bytescheduler(profile, cluster, credit=3)

    monkeypatch.setitem(sys.modules, "optuna", None)
    assert tune(mine, SMALL, EIGHT) == bytescheduler(SMALL, EIGHT, credit=3)
    assert tune("wfbp", SMALL, EIGHT) == load("planner", "wfbp")(SMALL, EIGHT)
