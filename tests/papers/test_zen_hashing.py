"""What hashing does to entries: theorem 2, figures 16 and 17a."""

from __future__ import annotations

import pytest
import torch

from gradwire.collective.zen import zen
from gradwire.compress.nonzero import nonzero
from gradwire.compress.topk import topk
from gradwire.exchange.pair import pair
from gradwire_lab.laws.cases import Case
from gradwire_lab.laws.collectives import law_equals_the_dense_mean
from gradwire_lab.laws.exchanges import law_nothing_is_lost_or_made
from papers.zen import balance as zen_balance
from papers.zen import formats as zen_formats
from papers.zen import hashing as zen_hashing
from tests.each import each
from tests.papers.small import Measured

pytestmark = pytest.mark.slow


def test_hashed_parts_are_balanced_and_ranges_are_not(
    measured: Measured,
) -> None:
    rows = {str(row["name"]): row for row in measured("zen", "theorem2").rows}
    assert rows["all in front, 16 ranks"]["push_by_ranges"] == 16
    for row in rows.values():
        for way in zen_balance.WAYS:
            assert row[f"{way}_imbalance"] <= row[f"{way}_bound"]  # type: ignore[operator]


def test_more_memory_and_more_hash_functions_leave_less_to_serial_memory(
    measured: Measured,
) -> None:
    rows = measured("zen", "figure16").rows
    for figure in ("16a", "16b"):
        own = [row for row in rows if row["figure"] == figure]
        shares = [float(row["fraction_written_serially"]) for row in own]  # type: ignore[arg-type]
        assert shares == sorted(shares, reverse=True)
        assert shares[-1] < shares[0] / 3
        assert {row["fraction_beyond_serial"] for row in own[1:]} == {0.0}


@each("memory, lost", [(0.25, 0.176), (1.0, 0.048), (4.0, 0.0125)])
def test_the_strawman_loses_what_its_load_says(memory: float, lost: float) -> None:
    """1 - (1 - exp(-x)) / x of the entries at a load of x; none is made up."""
    indices_K = zen_hashing.drawn(400_000, 0.1).indices_K
    kept = torch.cat(zen_hashing.algorithm_3(indices_K, 8, round(memory * 50_000)))
    assert kept.unique().numel() == kept.numel()
    assert set(kept.tolist()) < set(indices_K.tolist())
    assert 1 - kept.numel() / indices_K.numel() == pytest.approx(lost, abs=0.005)


@each("memory", [1.0, 4.0])
def test_laws_that_zen_keeps_reject_the_strawman(memory: float) -> None:
    """A lost element is in no mean, and in no residual."""
    case = Case(world=3, numel=400)
    for law, codec in (
        (law_equals_the_dense_mean, nonzero()),
        (law_nothing_is_lost_or_made, topk(density=0.3)),
    ):
        law(pair(codec, zen()), case)
        with pytest.raises(AssertionError):
            law(pair(codec, zen_hashing.strawman(memory=memory)), case)


def test_sizes_are_those_of_the_formulas() -> None:
    numel = 2**12
    indices_K = torch.arange(0, numel, 8, dtype=torch.int32)
    kept, part = len(indices_K), numel // zen_formats.SERVERS
    sizes = {
        key: zen_formats.encoded_bytes(key, indices_K, numel)
        for key in zen_formats.FORMATS
    }
    assert sizes == {
        "hash_bitmap": 4 * kept + zen_formats.SERVERS * part // 8,
        "coo": 8 * kept,
        "bitmap": 4 * kept + zen_formats.SERVERS * numel // 8,
        "blocks": numel // 256 * (4 + 256 * 4),
    }
