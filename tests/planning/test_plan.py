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
from gradwire_lab.planner.bytescheduler import bytescheduler
from tests.planning.profiles import TEN_GBIT, vgg16

EIGHT = Cluster(num_ranks=8, rate_bytes_per_s=TEN_GBIT)
VGG16 = vgg16()


def test_by_name_and_as_a_function_it_is_the_same_plan() -> None:
    given = gw.plan("bytescheduler", VGG16, EIGHT, credit=3)
    assert given == bytescheduler(VGG16, EIGHT, credit=3)
    assert given == gw.plan(bytescheduler, VGG16, EIGHT, credit=3)
    assert given == gw.plan(partial(bytescheduler, credit=3), VGG16, EIGHT)
    assert isinstance(given, gw.Plan)
    assert gw.simulate(given, VGG16, EIGHT).iteration_s == iteration_s(given, VGG16, EIGHT)


def test_tune_searches_what_is_not_given() -> None:
    plan = gw.plan("bytescheduler", VGG16, EIGHT, tune=True, credit=2)
    default = bytescheduler(VGG16, EIGHT, credit=2)
    assert plan.settings["credit"] == 2
    assert iteration_s(plan, VGG16, EIGHT) <= iteration_s(default, VGG16, EIGHT)
    assert plan.settings != default.settings


def test_ones_own_planner_with_any_settings() -> None:
    def mine(profile: Profile, cluster: Cluster, **settings: Any) -> gw.Plan:
        assert settings == {"colour": "blue"}
        return wfbp(profile, cluster)

    assert gw.plan(mine, VGG16, EIGHT, colour="blue") == wfbp(VGG16, EIGHT)


def test_unknown_planners_and_settings_are_answered() -> None:
    with pytest.raises(UnknownName, match=r"no planner is called 'usbit'.*did you mean 'usbyte'"):
        gw.plan("usbit", VGG16, EIGHT)
    words = (
        "no setting of bytescheduler is called 'partition'; there are: credit, partition_bytes; "
    )
    with pytest.raises(UnknownName, match=words + "did you mean 'partition_bytes'"):
        gw.plan("bytescheduler", VGG16, EIGHT, partition=4)
    with pytest.raises(InvalidSetting, match="wfbp must be called without settings, got 'credit'"):
        gw.plan("wfbp", VGG16, EIGHT, credit=4)


def test_things_that_are_no_planner_no_profile_and_no_cluster() -> None:
    with pytest.raises(InvalidSetting, match="planner must be a planner's name or a function"):
        gw.plan(3, VGG16, EIGHT)  # type: ignore[arg-type]
    for given, name in ((max, "max"), (dict, "dict"), (lambda: 0, "<lambda>")):
        with pytest.raises(InvalidSetting, match=rf"\(profile, cluster, .*got '{name}'; write"):
            gw.plan(given, VGG16, EIGHT)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="in this order, got 'Cluster and Profile'"):
        gw.plan("wfbp", EIGHT, VGG16)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="got 'str and Cluster'; read files with"):
        gw.plan("wfbp", "vgg16.json", EIGHT)  # type: ignore[arg-type]


def test_a_planner_that_plans_nonsense_is_refused() -> None:
    def loses_a_message(profile: Profile, cluster: Cluster) -> gw.Plan:
        plan = wfbp(profile, cluster)
        return plan.model_copy(update={"messages": plan.messages[1:]})

    def plans_nothing(profile: Profile, cluster: Cluster) -> None:
        return None

    with pytest.raises(InvalidSetting, match="lost elements"):
        gw.plan(loses_a_message, VGG16, EIGHT)
    with pytest.raises(InvalidSetting, match="what plans_nothing returns must be a Plan"):
        gw.plan(plans_nothing, VGG16, EIGHT)  # type: ignore[arg-type]
