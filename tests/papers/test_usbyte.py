"""US-Byte's figures in small: what must hold of any of them, and of the readings behind them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

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
    LOSSY,
    MERGED,
    OURS,
    compare,
    most_over_wfbp,
)
from papers.usbyte.scaling import figure10, figure18
from papers.usbyte.setting import MODELS, cluster_1, profile_of
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


# Readings


def test_a_layer_is_a_tensor_keeps_bytes_and_seconds() -> None:
    for model in MODELS:
        whole, split = profile_of(model), profile_of(model, by_tensor=True)
        assert split.size_bytes == whole.size_bytes
        assert split.forward_s == pytest.approx(whole.forward_s)
        assert split.backward_s == pytest.approx(whole.backward_s)
        assert all(len(layer.tensors) <= 1 for layer in split.layers)
    # The paper's solution space of VGG16 is 32! (section 7.2).
    assert len(profile_of("vgg16", by_tensor=True).layers) == 32


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
