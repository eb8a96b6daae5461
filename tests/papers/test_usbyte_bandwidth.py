"""Figures 9, 11 and 14 and table 5 of US-Byte: verdicts on rows that are made up, and cuts."""

from __future__ import annotations

import pytest

from gradwire.planning.buckets import buckets
from papers.usbyte import bandwidth, lines, overhead
from papers.usbyte.bandwidth import figure14
from papers.usbyte.setting import profile_of
from tests.papers.figures import ask

pytestmark = pytest.mark.slow


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


def test_even_cuts_hold_every_element_once() -> None:
    cut = buckets(profile_of("googlenet"))
    parts = overhead.even(cut)
    for place, bucket in enumerate(cut):
        own = [(start, stop) for number, start, stop in parts if number == place]
        assert own[0][0] == 0
        assert own[-1][1] == bucket.numel
        assert [stop for _, stop in own[:-1]] == [start for start, _ in own[1:]]
