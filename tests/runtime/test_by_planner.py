"""attach by a planner's name: measured dense steps, then the plan for what was measured."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import gradwire as gw
from gradwire.errors import InvalidSetting
from tests.each import each
from tests.runtime.ranks import Ranks
from tests.runtime.test_auto import measured_quickly
from tests.runtime.test_checkpoint import through_a_file
from tests.runtime.training import Net, digest, momentum, train

pytestmark = pytest.mark.multi
CHOSEN: dict[str, Any] = {
    "usbyte": "usbyte",
    "secopa": gw.pilot.by_planner("secopa", measured_steps=3, compressor="terngrad"),
    "ssfusion": gw.pilot.by_planner("ssfusion", measured_steps=3, density=0.1),
}
"""The values that attach gets: a planner's name, and planners with settings."""


def planned(rank: int, world: int, name: str) -> dict[str, Any]:
    """15 steps; both states are loaded by another run, in its dense and in its planned steps."""
    net, chosen, found = Net(), CHOSEN[name], dict[str, Any]()
    optimizer = momentum(net.parameters())
    with measured_quickly():
        handle = gw.attach(net, chosen, optimizer=optimizer)
        train(net, optimizer, rank, range(4))
        before = through_a_file(handle.state_dict())
        found["dense"] = handle.plan
        train(net, optimizer, rank, range(4, 20))
        handle.synchronize()
        flight: Any = handle._controls._flight  # type: ignore[union-attr]
        settings = {} if isinstance(chosen, str) else chosen.settings
        expected = gw.plan(name, flight._profile, flight._cluster, **settings)
        assert handle.plan is not None
        found["same plan"] = handle.plan.to_json() == expected.to_json()
        found["codecs"] = sorted(flight._cluster.codecs)
        found["plan"], found["stats"] = handle.plan.to_json(), handle.stats()["pilot"]
        found["bits"] = digest(net)
        after = through_a_file(handle.state_dict())
        owed = {key: one.double().sum() for key, one in handle.residuals().items()}
        handle.detach()
        net = Net()
        optimizer = momentum(net.parameters())
        handle = gw.attach(net, chosen, optimizer=optimizer)
        handle.load_state_dict(after)
        found["owes"] = any(map(bool, owed.values()))
        found["kept"] = {k: one.double().sum() for k, one in handle.residuals().items()} == owed
        train(net, optimizer, rank, range(12))
        handle.synchronize()
        found["planned again"] = handle.plan is not None
        handle.load_state_dict(before)
        train(net, optimizer, rank, range(4, 6))
        handle.synchronize()
        found["resumed bits"], found["step"] = digest(net), handle.step
        handle.detach()
    return found


def test_planners_that_compare_or_need_sparsity_are_refused() -> None:
    for name, remedy in (("zen", r"gw\.plan\('zen'"), ("auto", r"gw\.pilot\.auto\(\)")):
        with pytest.raises(InvalidSetting, match=remedy):
            gw.pilot.by_planner(name)
    with pytest.raises(InvalidSetting, match="did you mean 'compressor'"):
        gw.pilot.by_planner("secopa", compresor="dgc")


@each("name", [*CHOSEN])
def test_a_planner_plans_for_what_was_measured(two: Ranks, name: str) -> None:
    one, *others = two.run(planned, name)
    shared = ("plan", "bits", "resumed bits", "step", "codecs")
    for other in others:
        assert {key: other[key] for key in shared} == {key: one[key] for key in shared}
    assert one["dense"] is None
    assert one["same plan"]
    assert one["kept"]
    assert one["owes"] is (name == "ssfusion")
    assert one["planned again"]
    assert one["codecs"] == {"usbyte": [], "secopa": ["terngrad"], "ssfusion": ["dgc"]}[name]
    stats = one["stats"]
    assert (stats["planner"], stats["is_planned"]) == (name, True)
    assert stats["planned_at"] in (6, 9)
    assert stats["predicted_s"] > 0
    assert stats["dense_s"] > 0
    assert "are predicted" in stats["decisions"][0]


def refused(rank: int, world: int, error: Exception) -> tuple[str, list[str], bool]:
    """The planner takes what is tried at attach, and not what rank 0 has measured."""
    net = Net()
    optimizer = momentum(net.parameters())
    handle = gw.attach(net, gw.pilot.by_planner("mgwfbp", measured_steps=2))
    with measured_quickly(), mock.patch("gradwire.runtime.pilot.by_planner.plan") as made:
        made.side_effect = error
        train(net, optimizer, rank, range(8))
    found = digest(net), handle.stats()["pilot"]["decisions"], handle.plan is None
    handle.detach()
    return found


def test_a_refusal_of_what_was_measured_leaves_gradients_dense(two: Ranks) -> None:
    for error, words in (
        (InvalidSetting("too slow"), "the planner refuses: too slow"),
        (ZeroDivisionError("no links"), "the planner fails: ZeroDivisionError: no links"),
    ):
        one, other = two.run(refused, error)
        assert one == other
        assert one[2]
        assert words in one[1][0]
        assert one[1][0].endswith("gradients stay dense")
