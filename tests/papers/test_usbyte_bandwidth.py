"""Figures 9, 11 and 14 and table 5 of US-Byte: verdicts on rows that are made up, and cuts."""

from __future__ import annotations

import pytest

from gradwire.planning.buckets import buckets
from papers.usbyte import bandwidth, lines, overhead
from papers.usbyte.bandwidth import figure14
from papers.usbyte.setting import profile_of
from tests.papers.figures import ask

pytestmark = pytest.mark.slow


def line_rows(name: str, num_ranks: int, a_s: float, b_s: float) -> list[dict[str, object]]:
    return [
        {
            "cluster": name,
            "num_ranks": num_ranks,
            "size_bytes": size_bytes,
            "simulated_s": a_s + b_s * size_bytes,
        }
        for size_bytes in (10**6, 10**7, 10**8)
    ]


@pytest.mark.parametrize("name", lines.CLUSTERS)
def test_terms_are_held_against_the_printed_ones(name: str) -> None:
    _, _, a_s, b_s = lines.CLUSTERS[name]
    for factor, agrees in ((1.0, True), (1.04, True), (1.5, False)):
        rows = line_rows(name, 8, factor * a_s, factor * b_s)
        for claim in (lines.intercept_claim(rows, name), lines.slope_claim(rows, name)):
            built_in = agrees and "a is" in claim.says
            assert claim.agrees is (None if built_in else agrees)
            assert bool(claim.why) == (claim.agrees is not True)


def test_a_bent_line_is_not_straight_and_growth_is_that_of_equation_14() -> None:
    rows = line_rows("cluster 1", 8, 14e-4, 14e-10)
    assert lines.linear_claim(rows).agrees is None, "the simulator's own line"
    assert lines.linear_claim([*rows[:-1], rows[-1] | {"simulated_s": 0.5}]).agrees is False
    assert lines.equation_claim(rows).agrees is None
    halved = line_rows("cluster 1", 2, 2e-4, 8e-10)
    assert lines.equation_claim([*rows, *halved]).why == lines.BUILT_IN
    assert lines.equation_claim([*rows, *line_rows("cluster 1", 2, 4e-4, 8e-10)]).agrees is False
    assert lines.equation_claim([*rows, *line_rows("cluster 1", 2, 2e-4, 9e-10)]).agrees is False


def test_a_ring_played_hop_by_hop_is_a_line_of_the_links_rate() -> None:
    """The printed b is neither cluster's: one is of faster links, one of slower."""
    found = lines.figure9(ask())
    fits = lines.fits(found.rows)
    for name, (_, rate, a_s, b_s) in lines.CLUSTERS.items():
        line = fits[name, 8]
        assert line.alpha_s == pytest.approx(a_s, rel=1e-3)
        assert line.per_unit_s == pytest.approx(1.75 / rate, rel=1e-3)
        assert (line.per_unit_s > b_s) == (name == "cluster 1")
    assert [claim.agrees for claim in found.claims] == [None, None, False, None, False, None]
    assert "carry 49.7 GB a second; these carry 1.25" in found.claims[2].why


def test_a_rival_that_hides_more_is_told_from_one_that_hides_less() -> None:
    row = {"name": "m", "num_ranks": 2, "exposed_usbyte_s": 0.2, "exposed_wfbp_s": 0.3}
    assert bandwidth.least_claim([row], "wfbp").agrees is True
    claim = bandwidth.least_claim([row, row | {"num_ranks": 4, "exposed_wfbp_s": 0.1}], "wfbp")
    assert claim.agrees is False
    assert "m on 4" in claim.why
    assert bandwidth.grows_claim([row, row | {"exposed_wfbp_s": 0.4}], "m").agrees is True
    assert bandwidth.grows_claim([row, row], "m").agrees is False


@pytest.mark.parametrize(("gain", "agrees"), [(0.24, True), (0.0, False), (0.6, False)])
def test_gains_at_a_bandwidth_agree_near_the_papers(gain: float, agrees: bool) -> None:
    row = {
        "name": "vgg16",
        "rate_gbit": 20,
        "fraction_over_bytescheduler": gain,
        "fraction_exposed": 0.1,
        "fraction_latency_bytescheduler": 0.2,
    }
    assert bandwidth.gain_claim([row], "vgg16").agrees is agrees
    at_60 = row | {"rate_gbit": 60, "fraction_over_bytescheduler": 0.05 if agrees else gain}
    assert bandwidth.range_claim([at_60], "bytescheduler").agrees is agrees


def test_more_bandwidth_is_never_slower_and_a_slow_one_is_not_stable() -> None:
    found = figure14(ask(), models=("bert_base",), rates_gbit=(10, 60, 100))
    for planner in ("usbyte", "wfbp"):
        speeds = [float(str(row[f"samples_per_s_{planner}"])) for row in found.rows]
        assert speeds == sorted(speeds)
    slow = [dict(row) for row in found.rows]
    slow[1]["samples_per_s_usbyte"] = 0.5 * float(str(slow[2]["samples_per_s_usbyte"]))
    assert bandwidth.stable_claim(found.rows, ["bert_base"]).agrees is True
    assert bandwidth.stable_claim(slow, ["bert_base"]).agrees is False
    row = {"name": "resnet50", "rate_gbit": 10, "fraction_exposed": 0.3}
    hidden = row | {"rate_gbit": 60, "fraction_exposed": 0.01}
    assert bandwidth.hidden_claim([row, hidden]).agrees is True
    assert bandwidth.hidden_claim([row | {"fraction_exposed": 0.01}, hidden]).agrees is False


def test_shares_of_partitioning_are_held_against_the_papers() -> None:
    row = {"name": "vgg16", "fraction_usbyte": 0.001, "fraction_bytescheduler": 0.002}
    assert overhead.small_claim([row]).agrees is True
    assert overhead.small_claim([row | {"fraction_usbyte": 0.02}]).agrees is False
    (claim,) = overhead.order_claims([row])
    assert claim.agrees is True
    (claim,) = overhead.order_claims([row | {"fraction_usbyte": 0.01}])
    assert claim.agrees is False


def test_even_cuts_hold_every_element_once() -> None:
    cut = buckets(profile_of("googlenet"))
    parts = overhead.even(cut)
    for place, bucket in enumerate(cut):
        own = [(start, stop) for number, start, stop in parts if number == place]
        assert own[0][0] == 0
        assert own[-1][1] == bucket.numel
        assert [stop for _, stop in own[:-1]] == [start for start, _ in own[1:]]
