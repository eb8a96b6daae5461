"""Figures 9, 11 and 14 and table 5 of US-Byte: verdicts on rows that are made up, and cuts."""

from __future__ import annotations

import pytest

from gradwire.planning.buckets import buckets
from papers.usbyte import lines, overhead
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


def test_even_cuts_hold_every_element_once() -> None:
    cut = buckets(profile_of("googlenet"))
    parts = overhead.even(cut)
    for place, bucket in enumerate(cut):
        own = [(start, stop) for number, start, stop in parts if number == place]
        assert own[0][0] == 0
        assert own[-1][1] == bucket.numel
        assert [stop for _, stop in own[:-1]] == [start for start, _ in own[1:]]
