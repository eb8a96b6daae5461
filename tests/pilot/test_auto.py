"""The life of a run under auto: dense steps, a plan, dense steps to compare, another
link.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.contract.registry import load
from gradwire.errors import InvalidSetting
from tests.each import each, few
from tests.runtime.ranks import Ranks
from tests.runtime.state.test_checkpoint import through_a_file
from tests.runtime.test_controls import lossy, put
from tests.runtime.training import Net, batch, ddp, digest, momentum, train

pytestmark = pytest.mark.multi
SETTINGS = {"measured_steps": 3, "review_steps": 4, "trial_steps": 14}


@contextmanager
def measured_quickly() -> Iterator[Any]:
    """Links and compressors by few and short messages; auto's module."""
    load("pilot", "auto")
    module, first = (
        sys.modules[f"gradwire.pilot.{name}"] for name in ("auto", "_measured")
    )
    less = {
        "BUDGET_S": 1e-3,
        "ROUNDS": 1,
        "MOST_BYTES": 2**18,
        "CODEC_SIZES": (2**12, 2**13, 2**14),
    }
    with (
        mock.patch.multiple(first, **less),
    ):
        yield module


@contextmanager
def seen(**seconds: Any) -> Iterator[None]:
    """Has auto see these figures in place of what the machine's mood makes of them.

    ``step_s`` are those of each review, the last one for all that follow; ``slowness``
    is called where a message is timed. The plan is one that compresses, as are its
    ``num_rivals``, and means may be as far from dense ones as they will, but for the
    fidelities in ``allowed``.
    """
    steps, last = iter(seconds["step_s"]), list[float]()

    def typical_s(own: Sequence[float]) -> float:
        last[:] = [next(steps, *last)] if last else [next(steps)]
        return last[0]

    def proposal(profile: Any, cluster: Any, *rest: Any, **settings: Any) -> Any:
        assert (cluster.host is None) is bool(cluster.collectives)
        assert {t.name for layer in profile.layers for t in layer.tensors} == {
            name for name, _ in Net().named_parameters()
        }
        plans = [
            (lossy(1 + number), 0.1) for number in range(seconds.get("num_rivals", 0))
        ]
        return module.Proposal(lossy(0), 0.1, 0.4, "first plan", tuple(plans))

    with measured_quickly() as module:
        errors = dict.fromkeys(module.MOST_ERROR, inf) | seconds.get("allowed", {})
        slowness = seconds.get("slowness", lambda engine, known: 1.0)
        with (
            mock.patch.object(module, "MOST_ERROR", errors),
            mock.patch("gradwire.pilot._measured.typical_s", typical_s),
            mock.patch("gradwire.pilot._measured.proposal", proposal),
            mock.patch.object(module, "slowness", slowness),
        ):
            yield


class Reentrant(Net):
    """A net whose last layers are computed again within the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        out: Tensor = checkpoint(self.tail, x, use_reentrant=True)
        return out

    def tail(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.deep(torch.relu(self.middle(x)))))  # type: ignore[no-any-return]


def lived(
    rank: int,
    world: int,
    step_s: Sequence[float],
    slowness: float,
    num: int,
    where: str = "plain",
    num_rivals: int = 0,
) -> Any:
    net = Reentrant() if "reentrant" in where else Net()
    optimizer = momentum(net.parameters())
    found = []
    with seen(step_s=step_s, slowness=lambda *_: slowness, num_rivals=num_rivals):
        model, handle = put(net, where, gw.pilot.auto(**SETTINGS), optimizer=optimizer)
        for step in range(num):
            train(model, optimizer, rank, [step])
            found.append(
                handle.plan and handle.plan.to_json()
                if num_rivals
                else bool(handle.plan)
            )
        handle.synchronize()
        pilot = handle.stats()["pilot"]
        assert all(one.member.cluster is not None for one in handle._progress.messages)
        steps = handle.step
        handle.detach()
    return digest(net), steps, found, pilot


def moments(found: Sequence[bool]) -> list[int]:
    """The numbers of steps after which the plan was another."""
    return [n + 1 for n in range(len(found)) if found[n] != ([False, *found][n])]


@pytest.mark.slow
def test_a_plan_is_taken_and_compared_with_dense_steps(two: Ranks) -> None:
    """6 dense steps, 2 + 4 + 1 planned ones, and after 14 that count a trial, which the
    plan wins.

    Ranks tell each other what steps take beside the one more.
    """
    seconds = [0.4, 0.1, 0.1, 0.1, 0.1, 0.4, 0.1]
    (one, steps, found, pilot), other = two.run(lived, seconds, 1.0, 45)
    assert (one, steps, found) == other[:3]
    assert steps == 45
    taken, left, back = moments(found)[:3]
    assert taken == 6
    assert left > taken + 14
    assert back - left == 6, (
        "two steps that are not counted, three that are, one to tell"
    )
    assert "predicted" in pilot["decisions"][0]
    assert any("the plan stays" in said for said in pilot["decisions"])
    assert pilot["is_planned"]
    assert pilot["measuring_s"] > 0


def test_a_plan_that_does_not_gain_is_left(two: Ranks) -> None:
    (one, _, found, pilot), (other, *_) = two.run(
        lived, [0.4, 0.5], 1.0, 20, "ddp, reentrant"
    )
    assert one == other
    assert moments(found) == [6, 13]
    assert "back to dense" in pilot["decisions"][-1]


def test_rivals_are_tried_one_by_one_and_the_fastest_is_kept(two: Ranks) -> None:
    """After 6 dense steps 2 + 4 + 1 by the plan, 2 + 4 + 1 by each rival, then by the
    fastest.
    """
    given = [0.4, 0.1, 0.09, 0.2, 0.09]
    (one, _, found, pilot), other = two.run(lived, given, 1.0, 30, "plain", 2)
    assert other[0] == one
    tried = [found[6], found[13], found[20]]
    assert len({None, *tried}) == 4
    dense, each = [None] * 5, [tried[0]] * 7 + [tried[1]] * 7 + [tried[2]] * 7
    assert found == dense + each + [tried[1]] * 4
    said = [one for one in pilot["decisions"] if "is tried" in one]
    assert len(said) == 2
    assert any("is taken again" in one for one in pilot["decisions"])


@pytest.mark.slow
def test_another_link_is_planned_for_anew(two: Ranks) -> None:
    """As by a link that goes from 1 Gbit to 50 Mbit; each decision is said once."""
    (one, _, found, pilot), (other, *_) = two.run(
        lived, [0.4, 0.1, 0.1, 2.0, 0.3], 20.0, 30
    )
    assert one == other
    assert found[6:] == [True] * 24, pilot["decisions"]
    said = [sentence for sentence in pilot["decisions"] if "planned anew" in sentence]
    assert len(said) == len(set(said)) == 1
    step = int(said[0].split()[1].rstrip(":"))
    assert step <= 16 + 4 + 1, "at the first review after the change"


def unquiet(rank: int, world: int) -> tuple[int, str]:
    """How often the link was timed in 60 steps of a machine whose steps differ, and
    bits.
    """
    net, num_probes = Net(), 0

    def slowness(engine: Any, known: Any) -> float:
        nonlocal num_probes
        num_probes += 1
        return 1.0

    with seen(step_s=[0.4, 0.5, *(0.4, 0.4, 0.56, 0.56) * 10], slowness=slowness):
        model, handle = put(net, "plain", gw.pilot.auto(**SETTINGS))
        train(model, momentum(net.parameters()), rank, range(60))
        handle.detach()
    return num_probes, digest(net)


def test_the_link_is_timed_less_and_less_where_steps_differ_for_nothing(
    two: Ranks,
) -> None:
    (num_probes, bits), other = two.run(unquiet)
    assert other == (num_probes, bits)
    assert 2 <= num_probes <= 4, (
        "of 12 reviews, every other one after other steps than before"
    )


class Output:
    """An object, in which nobody finds tensors."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class OfAnObject(Reentrant):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


def grounded(rank: int, world: int, is_opaque: bool) -> tuple[str, str]:
    """A run that auto cannot see the steps of: the error if there is one, and what is
    logged.
    """
    model = ddp(OfAnObject() if is_opaque else Net())
    lines: list[str] = []
    watch = logging.Handler(logging.WARNING)
    watch.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(watch)
    handle, said = gw.attach(model, gw.pilot.auto(**SETTINGS)), ""
    try:
        with measured_quickly():
            for step in range(7):
                x, _ = batch(rank, step)
                if is_opaque:
                    model(x).value.sum().backward()
                else:
                    checkpoint(
                        model, x.requires_grad_(), use_reentrant=True
                    ).sum().backward()
                assert handle.plan is None
    except gw.RankFailed as error:
        said = str(error)
    finally:
        logging.getLogger("gradwire").removeHandler(watch)
    decisions = handle.stats()["pilot"]["decisions"]
    assert [line.removeprefix("auto, ") for line in lines] == decisions * (rank == 0)
    handle.detach()
    return said, decisions[0] if decisions else ""


def test_where_auto_sees_no_steps_it_says_so(doomed_two: Ranks) -> None:
    assert all(
        "a pilot (auto) cannot see" in error
        for error, _ in doomed_two.run(grounded, True)
    )


def test_where_auto_sees_no_forward_pass_it_says_so(two: Ranks) -> None:
    for error, decision in two.run(grounded, False):
        assert not error
        assert "gradients stay dense" in decision


def dropped(rank: int, world: int, where: str) -> list[str]:
    """Left in the midst of measuring: no hook of its own is left."""
    net = Net()
    model, handle = put(net, where, gw.pilot.auto(**SETTINGS))
    train(model, momentum(net.parameters()), rank, range(4))
    handle.detach()
    modules = [module for module in net.modules() if module._forward_pre_hooks]
    return [type(module).__name__ for module in modules] + [
        name
        for name, param in net.named_parameters()
        if param._post_accumulate_grad_hooks
    ]


@each("where", ["plain", "ddp"])
def test_detach_in_the_midst_of_measuring_leaves_no_hook(
    two: Ranks, where: str
) -> None:
    assert two.run(dropped, where) == [[], []]


def alone(rank: int, world: int) -> list[str]:
    net = Net()
    handle = gw.attach(net, "auto")
    train(net, momentum(net.parameters()), rank, range(3))
    decisions: list[str] = handle.stats()["pilot"]["decisions"]
    handle.detach()
    return decisions


def test_a_rank_alone_plans_nothing_and_says_so(one: Ranks) -> None:
    assert one.run(alone) == [["step 1: there is one rank, which exchanges nothing"]]


def measured(rank: int, world: int, where: str) -> Any:
    """The whole of it by real figures, whatever they say here."""
    net = Net()
    optimizer = momentum(net.parameters())
    chosen = gw.pilot.auto(**SETTINGS, fidelity="half")
    with measured_quickly():
        model, handle = put(net, where, chosen, optimizer=optimizer)
        train(model, optimizer, rank, range(20))
        handle.synchronize()
        pilot = handle.stats()["pilot"]
        handle.detach()
    return (
        digest(net),
        pilot["decisions"],
        pilot["is_planned"],
        pilot["rate_bytes_per_s"],
    )


@few("where", ["ddp", "hosts"])
def test_all_ranks_decide_alike_by_what_they_measure(
    two: Ranks, four: Ranks, where: str
) -> None:
    one, *others = (four if where == "hosts" else two).run(measured, where)
    assert others == [one] * len(others)
    assert one[1][0].startswith("step 6: links carry")
    assert one[3] > 0


# ---- attach by a planner's name: measured dense steps, then the plan for what was meas


CHOSEN: dict[str, Any] = {
    "usbyte": "usbyte",
    "secopa": gw.pilot.by_planner("secopa", measured_steps=3, compressor="terngrad"),
    "ssfusion": gw.pilot.by_planner("ssfusion", measured_steps=3, density=0.1),
}
"""The values that attach gets: a planner's name, and planners with settings."""


def planned(rank: int, world: int, name: str) -> dict[str, Any]:
    """15 steps; both states are loaded by another run, in its dense and in its planned
    steps.
    """
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
        found["kept"] = {
            k: one.double().sum() for k, one in handle.residuals().items()
        } == owed
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


@few("name", CHOSEN)
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
    assert (
        one["codecs"]
        == {"usbyte": [], "secopa": ["terngrad"], "ssfusion": ["dgc"]}[name]
    )
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
    with measured_quickly(), mock.patch("gradwire.pilot.by_planner.plan") as made:
        made.side_effect = error
        train(net, optimizer, rank, range(8))
    found = digest(net), handle.stats()["pilot"]["decisions"], handle.plan is None
    handle.detach()
    return found


def test_a_refusal_of_what_was_measured_leaves_gradients_dense(two: Ranks) -> None:
    for error, words in (
        (InvalidSetting("too slow"), "the planner refuses: too slow"),
        (
            ZeroDivisionError("no links"),
            "the planner fails: ZeroDivisionError: no links",
        ),
    ):
        one, other = two.run(refused, error)
        assert one == other
        assert one[2]
        assert words in one[1][0]
        assert one[1][0].endswith("gradients stay dense")
