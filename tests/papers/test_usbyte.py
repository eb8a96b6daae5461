"""US-Byte's figures in small: what must hold of any of them, and of the readings behind them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given

from gradwire.errors import TestbedUnavailable
from gradwire.planning.buckets import buckets
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Profile
from gradwire.planning.phases import Instance
from gradwire.planning.planner.usbyte import usbyte
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire_bench.schedule import schedule
from gradwire_lab.laws.inputs import profile_of as drawn
from papers import page
from papers.frame import Findings, Reproduction
from papers.usbyte.bandwidth import figure11, figure14
from papers.usbyte.blocks import figure15, figure16
from papers.usbyte.error import TABLE_4, table4
from papers.usbyte.lines import figure9
from papers.usbyte.order import SecondPhase, figure13
from papers.usbyte.overhead import table5
from papers.usbyte.printed import AsPrinted, plan_as_printed
from papers.usbyte.readings import (
    FREE,
    LOSSY,
    MERGED,
    OURS,
    as_printed,
    by_doublings,
    by_hops,
    compare,
    from_rate,
    most_over_wfbp,
    needed_messages,
)
from papers.usbyte.scaling import figure10, figure18
from papers.usbyte.setting import MODELS, cluster_1, cluster_2, profile_of
from tests.papers.figures import ask, law_of_figures
from tests.planning.profiles import clusters, profiles
from tests.strategies import bounded

pytestmark = pytest.mark.slow

ROUNDING = 1e-9


@pytest.fixture(scope="module")
def scaling() -> Findings:
    return figure18(ask(), models=("vgg16", "resnet50"), ranks=(8, 32, 128))


SMALL = {
    "figure9": figure9,
    "figure10": partial(figure10, models=("vgg16",), ranks=(2, 8), trials=1),
    "table5": partial(table5, models=("vgg16", "googlenet"), repeats=2),
    "figure11": partial(figure11, models=("vgg16",), ranks=(2, 8), trials=1),
    "figure13": partial(figure13, orders=200),
    "figure14": partial(figure14, models=("resnet50", "vgg16"), rates_gbit=(10, 20, 60, 100)),
    "figure15": partial(figure15, models=("vgg16", "googlenet"), sizes_mbit=(0.1, 8.0)),
    "figure16": partial(figure16, models=("vgg16",), sizes_mbit=(0.5, 8.0)),
}


@pytest.fixture(scope="module")
def small() -> dict[str, Findings]:
    return {name: measure(ask()) for name, measure in SMALL.items()}


@pytest.mark.parametrize("name", [*SMALL, "figure18"])
def test_figures(small: dict[str, Findings], scaling: Findings, name: str, tmp_path: Path) -> None:
    law_of_figures("usbyte", name, (small | {"figure18": scaling})[name], tmp_path)


def test_every_figure_is_registered_and_has_a_measure_of_its_own() -> None:
    paper: Reproduction = page("usbyte")
    names = [figure.name for figure in paper.figures]
    assert sorted(names) == sorted([*SMALL, "table4", "figure18"])
    assert len({figure.measure for figure in paper.figures}) == len(names)
    assert {figure.name for figure in paper.figures if figure.draw is None} <= {"table4", "table5"}


# Figure 13


def test_no_random_order_is_faster_and_some_are_slower(small: dict[str, Findings]) -> None:
    for row in small["figure13"].rows:
        assert row["num_faster"] == 0
        assert row["num_blocks"] > 3
        assert row["samples_per_s_random_worst"] < row["samples_per_s_sequential"]
        assert row["fraction_as_fast"] < 1


def test_orders_cost_what_the_simulator_says() -> None:
    profile, cluster = profile_of("vgg16"), cluster_1(8)
    plan = usbyte(profile, cluster, basic_partition_bytes=500_000)
    phase = SecondPhase.of(plan, profile, cluster)
    size = len(phase.block_s_K)
    first = len(plan.messages) - size
    draw = np.random.default_rng(1)
    for order in [np.arange(size), *(draw.permutation(size) for _ in range(20))]:
        tail = [plan.messages[first + place] for place in order]
        shuffled = plan.model_copy(update={"messages": (*plan.messages[:first], *tail)})
        expected_s = iteration_s(shuffled, profile, cluster)
        assert phase.iterations_s(order[None])[0] == pytest.approx(expected_s, rel=1e-12)


def test_the_count_of_faster_orders_bites() -> None:
    """Backward order in the second phase is beaten by many."""
    profile, cluster = profile_of("vgg16"), cluster_1(8)
    phase = SecondPhase.of(usbyte(profile, cluster), profile, cluster)
    draw = np.random.default_rng(0)
    orders_PK = np.array([draw.permutation(len(phase.block_s_K)) for _ in range(50)])
    backward_s = phase.iterations_s(np.argsort(-phase.layer_K)[None])[0]
    assert (phase.iterations_s(orders_PK) < backward_s * (1 - ROUNDING)).any()


# Figures 15 and 16


def test_small_blocks_slow_bytescheduler_and_never_wfbp(small: dict[str, Findings]) -> None:
    fine, coarse = small["figure16"].rows
    assert fine["partition_mbit"] == 0.5
    assert fine["samples_per_s_bytescheduler"] < coarse["samples_per_s_bytescheduler"]
    assert fine["samples_per_s_wfbp"] == coarse["samples_per_s_wfbp"]
    for row in (fine, coarse):
        assert row["samples_per_s_usbyte"] >= row["samples_per_s_wfbp"] * (1 - ROUNDING)
    assert fine["num_messages_bytescheduler"] > 10 * coarse["num_messages_bytescheduler"]


# Figures 10 and 18


def test_speedup_rises_with_nodes_and_stays_below_linear(scaling: Findings) -> None:
    ours = [row for row in scaling.rows if row["name"] == OURS.name]
    for model in ("vgg16", "resnet50"):
        found = [row["speedup_usbyte"] for row in ours if row["model"] == model]
        assert found == sorted(found)
        assert len(set(found)) == 3
    for row in ours:
        assert row["speedup_usbyte"] <= row["num_ranks"] * (1 + ROUNDING)
        assert row["fraction_over_wfbp"] >= -ROUNDING


def test_no_sound_row_gains_more_than_the_bound(scaling: Findings) -> None:
    bounded_rows = [row for row in scaling.rows if row["fraction_most_over_wfbp"] is not None]
    assert len({row["name"] for row in bounded_rows}) >= 7
    for row in bounded_rows:
        assert row["fraction_over_wfbp"] <= row["fraction_most_over_wfbp"] <= 1


def test_merging_layers_breaks_the_bound(scaling: Findings) -> None:
    """Or it would bind nothing: fewer messages than layers gain more than 100 %."""
    merged = [row for row in scaling.rows if row["name"] == MERGED.name]
    assert max(row["fraction_over_wfbp"] for row in merged) > 1


@bounded(40)
@given(profiles(), clusters)
def test_the_bound_holds_for_any_model_and_cluster(profile: Profile, cluster: Cluster) -> None:
    ours_s = iteration_s(usbyte(profile, cluster, trials=8), profile, cluster)
    wfbp_s = iteration_s(wfbp(profile, cluster), profile, cluster)
    dtypes_mixed = len(buckets(profile)) > sum(1 for la in profile.layers if la.size_bytes)
    if ours_s and not dtypes_mixed:
        most = most_over_wfbp(profile, cluster)
        assert most <= 1 + ROUNDING
        assert wfbp_s / ours_s - 1 <= most + ROUNDING


def test_wfbp_would_need_more_messages_than_there_are_layers() -> None:
    found = compare(OURS, "vgg16", 128)
    sent, needed = needed_messages(OURS, "vgg16", 128, found.seconds["usbyte"], 2.34)
    assert sent == len(profile_of("vgg16").layers)
    assert needed > sent
    # What it really gains needs about what it really sends.
    _, same = needed_messages(OURS, "vgg16", 128, found.seconds["usbyte"], found.over("wfbp"))
    assert same <= sent


def test_measured_improvements_stand_beside_8_nodes() -> None:
    rows = [
        {"model": "vgg16", "planner": planner, "fraction_over_wfbp_measured": gain}
        for planner, gain in (("usbyte", 0.25), ("usbyte_extended", 0.5))
    ]
    found = figure10(ask(table4=Findings((*rows,))), models=("vgg16",), ranks=(2, 8), trials=1)
    key = "fraction_over_wfbp_measured"
    with_it = {(row["name"], row["num_ranks"]): row[key] for row in found.rows if key in row}
    assert with_it == {(OURS.name, 8): 0.25, (FREE.name, 8): 0.5}


def test_tuned_usbyte_stands_beside_the_one_with_extensions(small: dict[str, Findings]) -> None:
    """On all numbers of nodes, and no extension is in the row of the paper's name."""
    rows = small["figure10"].rows
    by_name = {
        name: {row["num_ranks"]: row for row in rows if row["name"] == name}
        for name in (OURS.name, FREE.name)
    }
    assert set(by_name[OURS.name]) == set(by_name[FREE.name]) == {2, 8}
    for num_ranks, row in by_name[OURS.name].items():
        assert row["fraction_over_wfbp"] <= row["fraction_most_over_wfbp"]
        extended = by_name[FREE.name][num_ranks]["samples_per_s_usbyte"]
        assert extended >= row["samples_per_s_usbyte"] * (1 - ROUNDING)


# Readings


def test_readings_meet_at_8_nodes() -> None:
    assert by_hops(8) == by_doublings(8) == pytest.approx(910.5e-6)
    assert as_printed(8) == pytest.approx(0.352e-10)
    assert OURS.cluster(8).alpha_s == pytest.approx(cluster_1(8).alpha_s, rel=1e-3)
    assert OURS.cluster(128).beta_s_per_byte == pytest.approx(cluster_1(128).beta_s_per_byte)
    assert from_rate(8) == pytest.approx(1.4e-9)
    assert by_hops(128) > 4 * by_doublings(128)
    assert cluster_2().alpha_s == pytest.approx(1318.6e-6)


def test_a_layer_is_a_tensor_keeps_bytes_and_seconds() -> None:
    for model in MODELS:
        whole, split = profile_of(model), profile_of(model, by_tensor=True)
        assert split.size_bytes == whole.size_bytes
        assert split.forward_s == pytest.approx(whole.forward_s)
        assert split.backward_s == pytest.approx(whole.backward_s)
        assert all(len(layer.tensors) <= 1 for layer in split.layers)
    # The paper's solution space of VGG16 is 32! (section 7.2).
    assert len(profile_of("vgg16", by_tensor=True).layers) == 32


def test_a_credit_of_one_is_not_searched_for_and_a_free_one_is() -> None:
    in_turn = compare(replace(OURS, credit=1), "vgg16", 8, trials=3)
    assert in_turn.settings.endswith("credit 1")
    free = compare(FREE, "resnet50", 128)
    assert free.seconds["usbyte"] <= compare(MERGED, "resnet50", 128).seconds["usbyte"]


# Algorithm 1 as printed


def test_the_printed_algorithm_loses_blocks() -> None:
    profile, cluster = profile_of("vgg16"), cluster_1(2)
    lossy = plan_as_printed(profile, cluster, 2**20)
    assert 0 < lossy.fraction_sent < 1
    assert compare(LOSSY, "vgg16", 2).fraction_sent < compare(OURS, "vgg16", 2).fraction_sent == 1


def test_where_no_layer_is_served_twice_in_a_row_it_is_sound() -> None:
    """Each layer's block fits between two ends: no block is ever overwritten."""
    profile = drawn(*[([2**10], 0.5, 1.0)] * 5)
    cluster = Cluster(num_ranks=2, rate_bytes_per_s=2.0**20, hop_s=2**-9)
    sound = Instance.of(profile, cluster, buckets(profile), 2**12)
    printed = AsPrinted.of(profile, cluster, buckets(profile), 2**12)
    order = list(range(5))
    assert printed.blocks(order) == sound.blocks(order)


# Table 4


def test_without_a_testbed_the_papers_column_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TestbedUnavailable("no root here")

    monkeypatch.setattr(schedule, "run", refuse)
    found = table4(ask())
    assert not found.complete
    assert {row["model"]: row["fraction_error_paper"] for row in found.rows} == TABLE_4
    assert all("measured_s" not in row for row in found.rows)
    assert "no root here" in found.notes[0]
    assert found.claims[0].agrees is None


def measured_row(name: str, measured_s: float, simulated_s: float) -> dict[str, object]:
    seconds = {"measured_s": measured_s, "simulated_s": simulated_s}
    return {"name": name, "model": "vgg16", "scale": 32.0, "slowdown": 3.0, **seconds}


@pytest.mark.parametrize(("simulated_s", "agrees"), [(1.92, True), (2.08, True), (2.2, False)])
def test_errors_are_relative_to_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, simulated_s: float, agrees: bool
) -> None:
    rows = [
        measured_row("wfbp", 3.0, 3.0),
        measured_row("usbyte", 2.0, simulated_s),
        measured_row("usbyte_extended", 1.5, 3.0),
    ]
    monkeypatch.setattr(schedule, "run", lambda *_, **__: SimpleNamespace(rows=rows))
    found = table4(ask(), models=("vgg16",))
    assert found.complete
    row, extended = found.rows
    assert row["fraction_error"] == pytest.approx(abs(simulated_s - 2.0) / 2.0)
    assert row["fraction_over_wfbp_measured"] == pytest.approx(0.5)
    assert found.claims[0].agrees is agrees, "the claim is of the paper's own planner"
    assert extended["name"] == "vgg16, with gradwire's extensions"
    assert extended["fraction_over_wfbp_measured"] == pytest.approx(1.0)
    assert "fraction_error_paper" not in extended
