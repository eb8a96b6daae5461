"""``bench sparse``: its draws have the figures asked for, and every scheme runs for
real.
"""

from __future__ import annotations

import pytest

from gradwire_bench.micro import sparse
from gradwire_bench.micro.draws import IndexDraws, SetMeasures
from gradwire_bench.micro.sparse import SparseBench, run
from gradwire_bench.micro.sparse_rank import OWN, SCHEMES
from tests.bench.testbed.forked import fork_ranks
from tests.each import each


@each("overlap, skew, run_", [(0.3, 5.0, 1), (0.6, 1.0, 16), (1.0, 8, 4)])
def test_draws_are_what_is_asked_for(overlap: float, skew: float, run_: int) -> None:
    draws = IndexDraws(
        numel=400_000, world=8, density=0.02, overlap=overlap, skew=skew, run=run_
    )
    pool = draws.pool()
    sets = [draws.taken(rank, pool) for rank in range(8)]
    for indices_K in sets:
        assert len(indices_K) == 8000
        assert bool((indices_K[1:] > indices_K[:-1]).all())
        assert 0 <= int(indices_K[0]) <= int(indices_K[-1]) < 400_000
        assert bool((indices_K.view(-1, run_)[:, 0] % run_ == 0).all())
    found = SetMeasures.of(sets, draws.numel)
    assert found.overlap == pytest.approx(overlap, abs=0.03)
    assert found.skewness == pytest.approx(skew, rel=0.05, abs=0.3)
    # Each of K / overlap is taken by some rank but with odds (1 - overlap)^8.
    assert found.densification == pytest.approx(
        (1 - (1 - overlap) ** 8) / overlap, rel=0.03
    )


@pytest.mark.slow
def test_every_scheme_runs_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few elements that most parts are empty: gloo carries nothing, too."""
    fork_ranks(monkeypatch, sparse)
    draws = IndexDraws(numel=601, world=3, density=0.006, overlap=1.0, skew=3.0)
    bench = SparseBench(draws=draws, repeats=1)
    rows = {str(row["name"]): row for row in run(bench, lambda done, what: None)}
    assert list(rows) == ["dense", *SCHEMES, *OWN]
    for name in SCHEMES:
        assert rows[name]["wire_bytes_per_step"] >= rows[name]["formula_bytes_per_step"]
    for name in OWN:  # oktopk's are those of most steps
        assert (
            rows[name]["wire_bytes_per_step"]
            > 0.5 * rows[name]["formula_bytes_per_step"]
            > 0
        )
    imbalance = rows["sparse_ps"]["pull_imbalance"]
    assert isinstance(imbalance, float)
    assert imbalance > 2
