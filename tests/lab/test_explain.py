"""Where an iteration's time goes, and what is said of it: figures against closed
forms.
"""

from __future__ import annotations

import random

import pytest

from gradwire.contract.registry import load, names
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Chunk, Plan, PlannedMessage
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.usbyte import usbyte
from gradwire_lab.planning.account import Account, Wait
from gradwire_lab.planning.explain import alternatives, explain
from tests.planning.profiles import (
    CODECS,
    exact_cluster,
    measured,
    random_instance,
)

QUICK = sorted({*names("planner")} - {"auto", "secopa"})
"""Planners that take no second for 64 ranks, as these two do."""
EIGHT = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9, codecs=CODECS)
VGG16 = catalogue.load("vgg16")
FREE = exact_cluster(hop_s=0.0, rate=64.0)
TWO = profile_of(([16], 1.0, 0.5), ([64], 8.0, 1.0))
"""At 64 bytes a second t0 takes 1 s and t1 4 s; t1 is ready at 1 s, t0 at 1.5 s."""


def _plan(
    *messages: PlannedMessage, overlap_forward: bool = True, credit: int = 1
) -> Plan:
    return Plan(
        planner="by hand",
        model="drawn",
        messages=messages,
        credit=credit,
        overlap_forward=overlap_forward,
    )


def _message(tensor: str, start: int, stop: int) -> PlannedMessage:
    return PlannedMessage(chunks=(Chunk(tensor=tensor, start=start, stop=stop),))


T0, T1 = _message("t0", 0, 16), _message("t1", 0, 64)


def test_waits_name_the_layer_the_message_and_the_seconds() -> None:
    account = Account.of(_plan(T1, T0), TWO, FREE)
    assert account.waits() == [Wait(layer=0, message=1, seconds=4.5)]
    assert account.exposed_s == 4.5
    first = Account.of(_plan(T0, T1), TWO, FREE)
    # t0 is sent from 1.5 to 2.5, forward 0 runs until 3.5, t1 arrives at 6.5.
    assert first.waits() == [Wait(1, 1, 3.0), Wait(0, 0, 1.0)]


def test_waits_add_up_to_what_is_exposed_and_no_plan_is_below_the_bound() -> None:
    draw = random.Random(8)
    for _ in range(6):
        profile, cluster, _ = random_instance(draw, draw.randint(1, 9))
        for name in QUICK:
            account = Account.of(
                load("planner", name)(profile, cluster), profile, cluster
            )
            waited_s = sum(wait.seconds for wait in account.waits())
            assert waited_s == pytest.approx(account.exposed_s, abs=1e-9)
            assert account.iteration_s >= account.bound_s * (1 - 1e-12)


def test_an_account_names_the_work_that_hides_a_message() -> None:
    account = Account.of(_plan(T1, T0), TWO, FREE)
    assert account.hidden_behind(0) == ("backward of layer0", 0.5)
    assert account.hidden_behind(1) == ("nothing", 0.0)
    later = Account.of(_plan(T0, T1), TWO, FREE)
    assert later.hidden_behind(1) == ("forward of layer0", 1.0)


def test_idle_though_ready_is_the_head_of_the_lines_doing() -> None:
    late = profile_of(([4], 1.0, 8.0), ([16], 1.0, 1.0))
    plan = _plan(_message("t0", 0, 4), _message("t1", 0, 16))
    account = Account.of(plan, late, FREE)
    assert account.idle_though_ready() == (8.0, 0)
    said = " ".join(explain(plan, late, FREE))
    assert "stands idle for 8.00 s while gradients are ready: message 0 is next" in said
    assert "Nothing is sent before the backward pass has ended" in said
    assert Account.of(wfbp(late, FREE), late, FREE).idle_though_ready() == (0.0, -1)


def test_said_figures_are_the_models() -> None:
    said = explain(usbyte(VGG16, EIGHT), VGG16, EIGHT)
    account = Account.of(usbyte(VGG16, EIGHT), VGG16, EIGHT)
    assert f"This one takes {1e3 * account.iteration_s:.3g} ms" in said[2]
    assert said[0].startswith(
        f"Computation alone takes {1e3 * account.compute_s:.3g} ms"
    )
    speedup = 8 * account.compute_s / account.iteration_s
    assert any(
        f"8 ranks do {speedup:.2f} times the work of one" in line for line in said
    )


def test_the_rates_said_are_those_at_which_it_no_longer_pays() -> None:
    """Just below the break-even rate all ranks do less than one, just above it more."""
    profile = VGG16
    words = next(
        line
        for line in explain(wfbp(profile, EIGHT), profile, EIGHT)
        if "Below" in line
    )
    number, unit = words.split()[1:3]
    rate = float(number) * {"Mbit/s": 1e6, "Gbit/s": 1e9}[unit] / 8
    alone_s = profile.forward_s + profile.backward_s
    for factor, pays in ((0.95, False), (1.05, True)):
        cluster = EIGHT.scaled(rate_bytes_per_s=rate * factor)
        took_s = iteration_s(wfbp(profile, cluster), profile, cluster)
        assert (took_s <= 8 * alone_s) is pays


def test_where_nothing_is_to_be_gained_it_says_so() -> None:
    """One layer: whoever schedules it, it is sent after its backward and before its
    forward.
    """
    alone = profile_of(([2**20], 0.5, 0.5))
    said = " ".join(explain(usbyte(alone, EIGHT), alone, EIGHT))
    assert "At no rate does usbyte gain 2 % over wfbp" in said


def test_alternatives_are_all_planners_the_fastest_first() -> None:
    profile = VGG16
    mine = usbyte(profile, EIGHT)
    rows = alternatives(mine, profile, EIGHT)
    assert {row["name"] for row in rows} == set(names("planner"))
    seconds = [float(str(row["simulated_s"])) for row in rows]
    assert seconds == sorted(seconds)
    by_name = {row["name"]: row for row in rows}
    assert by_name["usbyte"]["simulated_s"] == iteration_s(mine, profile, EIGHT)
    assert by_name["wfbp"]["speedup_vs_wfbp"] == 1.0
    assert "waits for all messages" in str(by_name["wfbp"]["why"])


def test_planners_that_refuse_are_named_with_the_reason() -> None:
    unmeasured = EIGHT.model_copy(update={"codecs": {}})
    rows = {
        row["name"]: row for row in alternatives(wfbp(TWO, unmeasured), TWO, unmeasured)
    }
    assert str(rows["secopa"]["why"]).startswith(
        "no plan: compressor must be one whose encode"
    )
    assert "simulated_s" not in rows["secopa"]


def test_why_names_latency_where_latency_it_is() -> None:
    profile = profile_of(*[([16], 0.001, 0.001)] * 50)
    cluster = exact_cluster(hop_s=0.25, rate=2.0**30)
    rows = {
        row["name"]: row
        for row in alternatives(wfbp(profile, cluster), profile, cluster)
    }
    assert str(rows["wfbp"]["why"]).startswith("latency of more messages")
    said = " ".join(explain(wfbp(profile, cluster), profile, cluster))
    assert "latencies take longer than their bytes" in said


def test_planners_whose_plans_cannot_be_simulated_are_named_last() -> None:
    """Of more ranks than steps can be played for; what has a closed form is told all
    the same.
    """
    many = measured(exact_cluster(num_ranks=2**14))
    rows = alternatives(wfbp(TWO, many), TWO, many)
    assert {row["name"] for row in rows} == set(names("planner"))
    left_out = [row for row in rows if "simulated_s" not in row]
    assert rows[-len(left_out) :] == left_out
    # planners that price by simulation
    said = (
        "not simulated: ranks of",
        "no plan: ranks of",
    )
    assert all(str(row["why"]).startswith(said) for row in left_out)
    assert "cupcake" in {row["name"] for row in left_out}
