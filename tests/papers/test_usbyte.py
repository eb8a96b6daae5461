"""US-Byte: orders, bounds, readings and algorithm 1 as it is printed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from gradwire.planning.buckets import buckets
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of as drawn
from gradwire_lab.planner.usbyte import usbyte
from gradwire_lab.planning.blocks import block_starts
from gradwire_lab.planning.phases import Instance
from papers.usbyte import energy, energy_rank, lines, losses, overhead
from papers.usbyte.order import SecondPhase
from papers.usbyte.printed import AsPrinted, plan_as_printed
from papers.usbyte.readings import LOSSY, OURS, compare, most_over_wfbp
from papers.usbyte.setting import MODELS, cluster_1, profile_of
from tests.each import each
from tests.papers.small import Measured, ask
from tests.planning.profiles import clusters, profiles
from tests.strategies import bounded

pytestmark = pytest.mark.slow

ROUNDING = 1e-9


def test_a_ring_played_hop_by_hop_is_a_line_of_the_links_rate() -> None:
    """The printed b is neither cluster's: one is of faster links, one of slower."""
    found = lines.figure9(ask())
    fits = lines.fits(found.rows)
    for name, (_, rate, a_s, b_s) in lines.CLUSTERS.items():
        line = fits[name, 8]
        assert line.alpha_s == pytest.approx(a_s, rel=1e-3)
        assert line.per_unit_s == pytest.approx(1.75 / rate, rel=1e-3)
        assert (line.per_unit_s > b_s) == (name == "cluster 1")
    assert [claim.agrees for claim in found.claims] == [
        None,
        None,
        False,
        None,
        False,
        None,
    ]
    assert "carry 49.7 GB a second; these carry 1.25" in found.claims[2].why


def test_orders_cost_what_the_simulator_says_and_no_random_one_is_faster(
    measured: Measured,
) -> None:
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
        assert phase.iterations_s(order[None])[0] == pytest.approx(
            expected_s, rel=1e-12
        )
    rows = measured("usbyte", "figure13").rows
    assert {row["model"]: row["num_blocks"] for row in rows} == {
        "resnet50": 12,
        "vgg16": 3,
    }
    for row in rows:
        assert row["num_faster"] == 0
        assert float(str(row["fraction_as_fast"])) < 1


@bounded(40)
@given(profiles(), clusters)
def test_the_bound_holds_for_any_model_and_cluster(
    profile: Profile, cluster: Cluster
) -> None:
    ours_s = iteration_s(usbyte(profile, cluster), profile, cluster)
    wfbp_s = iteration_s(wfbp(profile, cluster), profile, cluster)
    dtypes_mixed = len(buckets(profile)) > sum(
        1 for la in profile.layers if la.size_bytes
    )
    if ours_s and not dtypes_mixed:
        most = most_over_wfbp(profile, cluster)
        assert most <= 1 + ROUNDING
        assert wfbp_s / ours_s - 1 <= most + ROUNDING


def test_a_layer_is_a_tensor_keeps_bytes_and_seconds() -> None:
    for model in MODELS:
        whole, split = profile_of(model), profile_of(model, by_tensor=True)
        assert split.size_bytes == whole.size_bytes
        assert split.forward_s == pytest.approx(whole.forward_s)
        assert split.backward_s == pytest.approx(whole.backward_s)
        assert all(len(layer.tensors) <= 1 for layer in split.layers)
    # The paper's solution space of VGG16 is 32! (section 7.2).
    assert len(profile_of("vgg16", by_tensor=True).layers) == 32


def test_the_printed_algorithm_loses_blocks_of_a_layer_served_twice_in_a_row() -> None:
    lossy = plan_as_printed(profile_of("vgg16"), cluster_1(2), 2**20)
    assert 0 < lossy.fraction_sent < 1
    assert (
        compare(LOSSY, "vgg16", 2).fraction_sent
        < compare(OURS, "vgg16", 2).fraction_sent
        == 1
    )
    # each layer's block fits between two ends
    profile = drawn(*[([2**10], 0.5, 1.0)] * 5)
    cluster = Cluster(num_ranks=2, rate_bytes_per_s=2.0**20, hop_s=2**-9)
    sound = Instance.of(profile, cluster, buckets(profile), 2**12)
    printed = AsPrinted.of(profile, cluster, buckets(profile), 2**12)
    assert printed.blocks([*range(5)]) == sound.blocks([*range(5)])


def test_even_cuts_hold_every_element_once() -> None:
    cut = buckets(profile_of("googlenet"))
    parts = overhead.even(cut)
    for place, bucket in enumerate(cut):
        own = [(start, stop) for number, start, stop in parts if number == place]
        assert own[0][0] == 0
        assert own[-1][1] == block_starts(bucket, 1).stop
        assert [stop for _, stop in own[:-1]] == [start for start, _ in own[1:]]


# Figure 12


@each(
    "epochs, agrees",
    [((8.0, 9.0, 10.0), True), ((8.0, 9.0, 10.1), False), ((8.0, None), False)],
)
def test_nodes_reach_a_loss_in_as_many_epochs(
    epochs: tuple[float | None, ...], agrees: bool
) -> None:
    found = losses.alike_claim([{"epochs_to_goal": one} for one in epochs], 1.0)
    assert found.agrees is agrees
    assert bool(found.why) is not agrees


def test_communications_of_real_iterations_are_those_of_the_plans(
    measured: Measured,
) -> None:
    """L, delta_1 + delta_2 and the sum of m, at the same S_p."""
    rows = measured("usbyte", "figure17").rows
    counts = {str(row["framework"]): row["num_communications"] for row in rows}
    cut = buckets(profile_of("googlenet"))
    assert counts["wfbp"] == len(cut)
    every = sum(-(-one.size_bytes // energy.BASIC_BYTES) for one in cut)
    assert counts["bytescheduler"] == counts[energy.CREDIT_IN_BYTES] == every
    assert counts["wfbp"] <= counts["usbyte"] < every


def test_rapl_counters_are_read_where_they_are(tmp_path: Path) -> None:
    """Packages alone count, and a counter may begin again at 0 between two looks."""
    assert energy_rank.joules_counter(tmp_path / "none")() is None
    for name, kind, energy_uj in (
        ("intel-rapl:0", "package-0", 1_000_000),
        ("intel-rapl:0:0", "core", 5),
        ("intel-rapl:1", "package-1", 9_000_000),
    ):
        zone = tmp_path / name
        zone.mkdir()
        (zone / "name").write_text(f"{kind}\n")
        (zone / "energy_uj").write_text(f"{energy_uj}\n")
        (zone / "max_energy_range_uj").write_text("9999999\n")
    joules = energy_rank.joules_counter(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3500000\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("500000\n")
    assert joules() == pytest.approx(2.5 + 1.5)
