"""Table 7 of HiPress: all twelve cells, the verdict of each, and that no verdict is a constant."""

from __future__ import annotations

import pytest

from gradwire.planning.data.fit import LineFit
from papers.frame import Ask
from papers.hipress import plans

pytestmark = pytest.mark.slow

ASK = Ask(quick=True, report=lambda *_: None, earlier={})
OTHERS = {
    "casync_ps 16 nodes 4 MB": plans.GROWS,
    "casync_ps 16 nodes 16 MB": plans.BETWEEN,
    "casync_ring 4 nodes 4 MB": plans.FALLS,
    "casync_ring 16 nodes 16 MB": plans.FALLS,
}
"""The cells that come out otherwise, and why."""


def test_what_is_compressed_agrees_in_all_cells_and_partitions_in_eight() -> None:
    """Three of the eight are cells that the curves were chosen for, so nothing is said of them."""
    found = plans.table7(ASK)
    assert len(found.rows) == len(found.claims) == 12
    for row, claim in zip(found.rows, found.claims, strict=True):
        assert row["compresses"] == row["compresses_paper"]
        fits = row["partitions"] == row["partitions_paper"]
        assert fits == (row["name"] not in OTHERS)
        if str(row["name"]).startswith("casync_ps 4 nodes"):
            assert claim.agrees is None
        else:
            assert claim.agrees is fits
            assert claim.why == OTHERS.get(str(row["name"]), "")


@pytest.mark.parametrize("encode_s", [1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("rate", [1e9, 1e10, 1e11])
def test_no_lines_give_both_cells_of_four_megabytes(
    monkeypatch: pytest.MonkeyPatch, encode_s: float, rate: float
) -> None:
    """``GROWS``: two partitions on 4 nodes and one on 16 are minima of no curves together."""
    monkeypatch.setattr(plans, "ENCODE", LineFit(alpha_s=encode_s, per_unit_s=1e-11))
    monkeypatch.setattr(plans, "SEND", LineFit(alpha_s=1e-5, per_unit_s=1 / rate))
    size_bytes = 4 * plans.MIB
    few, many = (
        plans.cost("casync_ps", nodes).choose(size_bytes // 4, size_bytes, size_bytes / 32)
        for nodes in (4, 16)
    )
    if few.is_compressed and many.is_compressed:
        assert many.num_partitions >= min(few.num_partitions, 2)
