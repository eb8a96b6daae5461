"""gradwire bench select: a row for every sparsifier, and what DEFT's ranks share out."""

from __future__ import annotations

import pytest
import torch

from gradwire_bench.micro import select


@pytest.fixture(scope="module")
def rows():
    return {row["name"]: row for row in select.measure(60_000, 0.01, threads=1, rounds=4)}


@pytest.mark.smoke
def test_every_way_of_selecting_has_a_row(rows):
    plain = {"hardthreshold", "topk", "dgc", "graddrop", "gaussiank", "redsync"}
    plain |= {f"sidco/{name}" for name in ("exponential", "gamma", "pareto")}
    deft = {"deft/norms", *(f"deft/{ranks}" for ranks in select.RANKS)}
    assert set(rows) == {"copy"} | plain | {f"{name}/residual" for name in plain} | deft


def test_every_row_stands_beside_torch(rows):
    for name, row in rows.items():
        assert row["kernel_s"] > 0
        if name != "copy":
            ratio = row["abs_topk_s"] / row["kernel_s"]
            assert row["speedup_vs_abs_topk"] == pytest.approx(ratio)


def test_what_a_rank_of_deft_does_begins_with_the_norms_of_all_layers(monkeypatch):
    """However many ranks there are: the pass does not get shorter with more of them."""
    passes = []
    norms = select.range_norms

    def noting(grad_N, starts_L, stops_L, *others):
        passes.append(int((stops_L - starts_L).sum()))
        norms(grad_N, starts_L, stops_L, *others)

    monkeypatch.setattr(select, "range_norms", noting)
    numel = 60_000
    cases = {case.name: case for case in select._deft_cases(0.01, torch.randn(numel), {})}
    for ranks in select.RANKS:
        passes.clear()
        cases[f"deft/{ranks}"].run()
        assert passes == [numel]
