"""gradwire bench select: a row for every sparsifier, and what DEFT's ranks share out."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from gradwire.cli.main import app
from gradwire_bench.micro import select
from tests.each import each


@pytest.fixture(scope="module")
def rows():
    return {row["name"]: row for row in select.measure(60_000, 0.01, threads=1, rounds=4)}


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


@each("numel", [1, 9_408, 100_000, 25_000_000, 30_000_000])
def test_layers_are_as_long_as_was_asked(numel):
    sizes = select.layer_sizes(numel)
    assert sum(sizes) == numel
    assert min(sizes) > 0


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


def test_command_prints_json():
    given = ["bench", "select", "--numel", "2000", "--rounds", "4", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"][0]["name"] == "copy"
