"""``gw.plan``: planners by name or as functions, settings checked, plans checked."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import gradwire as gw
from gradwire.errors import InvalidSetting, UnknownName
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.bytescheduler import bytescheduler

EIGHT = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
SMALL = profile_of(
    ([4_000_000], 0.01, 0.02), ([2_000_000], 0.01, 0.02), ([900], 0.01, 0.02)
)


def test_by_name_and_as_a_function_it_is_the_same_plan() -> None:
    given = gw.plan("bytescheduler", SMALL, EIGHT, credit=3)
    assert given == bytescheduler(SMALL, EIGHT, credit=3)
    assert given == gw.plan(bytescheduler, SMALL, EIGHT, credit=3)
    assert given == gw.plan(partial(bytescheduler, credit=3), SMALL, EIGHT)
    assert isinstance(given, gw.Plan)
    assert gw.simulate(given, SMALL, EIGHT).iteration_s == iteration_s(
        given, SMALL, EIGHT
    )


def test_a_planner_of_ones_own_gets_its_settings() -> None:
    def mine(profile: Profile, cluster: Cluster, **settings: Any) -> gw.Plan:
        assert settings == {"colour": "blue"}
        return wfbp(profile, cluster)

    assert gw.plan(mine, SMALL, EIGHT, colour="blue") == wfbp(SMALL, EIGHT)


def test_unknown_planners_and_settings_are_answered() -> None:
    with pytest.raises(
        UnknownName, match=r"no planner is called 'usbit'.*did you mean 'usbyte'"
    ):
        gw.plan("usbit", SMALL, EIGHT)
    words = (
        "no setting of bytescheduler is called 'partition'; there are: credit, "
        "credit_bytes, partition_bytes; "
    )
    with pytest.raises(UnknownName, match=words + "did you mean 'partition_bytes'"):
        gw.plan("bytescheduler", SMALL, EIGHT, partition=4)
    with pytest.raises(
        InvalidSetting, match="wfbp must be called without settings, got 'credit'"
    ):
        gw.plan("wfbp", SMALL, EIGHT, credit=4)


def test_things_that_are_no_planner_no_profile_and_no_cluster() -> None:
    with pytest.raises(
        InvalidSetting, match="planner must be a planner's name or a function"
    ):
        gw.plan(3, SMALL, EIGHT)  # type: ignore[arg-type]
    for given, name in ((max, "max"), (dict, "dict"), (lambda: 0, "<lambda>")):
        with pytest.raises(
            InvalidSetting, match=rf"\(profile, cluster, .*got '{name}'; write"
        ):
            gw.plan(given, SMALL, EIGHT)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidSetting, match="in this order, got 'Cluster and Profile'"
    ):
        gw.plan("wfbp", EIGHT, SMALL)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="got 'str and Cluster'; read files with"):
        gw.plan("wfbp", "small.json", EIGHT)  # type: ignore[arg-type]


def test_a_planner_that_plans_nonsense_is_refused() -> None:
    def loses_a_message(profile: Profile, cluster: Cluster) -> gw.Plan:
        plan = wfbp(profile, cluster)
        return plan.model_copy(update={"messages": plan.messages[1:]})

    def plans_nothing(profile: Profile, cluster: Cluster) -> None:
        return None

    with pytest.raises(InvalidSetting, match="lost elements"):
        gw.plan(loses_a_message, SMALL, EIGHT)
    with pytest.raises(
        InvalidSetting, match="what plans_nothing returns must be a Plan"
    ):
        gw.plan(plans_nothing, SMALL, EIGHT)  # type: ignore[arg-type]
