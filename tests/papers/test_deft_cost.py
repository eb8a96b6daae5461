"""Section 5.3 of DEFT: what is counted, what the formula gives, and claims that can
fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit
from papers.deft import cost as deft_cost
from papers.deft.setting import LSTM, Application
from papers.frame import Ask, Findings
from tests.bench.testbed.forked import fork_ranks

pytestmark = pytest.mark.slow

ASK = Ask(quick=True, report=lambda fraction, what: None, earlier={})
WORLD = 4
TINY = {"vocabulary": 50, "embedding": 8, "hidden": 8, "batch": 1, "num_held_out": 4}
ALPHA_S, PER_BYTE_S = 0.01, 1e-6


def line(alpha_s: float) -> LineFit:
    return LineFit(alpha_s=alpha_s, per_unit_s=PER_BYTE_S)


CLUSTER = Cluster(
    num_ranks=WORLD,
    rate_bytes_per_s=1e6,
    collectives={
        "all_gather": line(ALPHA_S),
        "all_reduce": line(0.02),
        "broadcast": line(0.03),
    },
)
ROUNDS = {
    "topk": ["all_gather"],
    "cltk": ["broadcast", "all_reduce"],
    "deft": ["all_gather"] * 4,
}


def step(method: str, k: int, seconds: float) -> dict[str, Any]:
    asked = [(verb, 8 * k, 24 * k) for verb in ROUNDS[method]]
    return {
        "communication_s": seconds,
        "tx_bytes": 25 * k,
        "asked": asked,
        "num_own": k,
        "num_averaged": WORLD * k,
    }


def made(
    deft_s: float = 0.001, factor: float = 1.0, shaped: bool = True
) -> tuple[list[dict[str, Any]], bool]:
    """Every rank's steps: Top-k takes ``factor`` times its formula, DEFT ``deft_s``."""
    steps = {
        f"{method}, {density:g}": [
            step(method, k, deft_s if method == "deft" else topk_s)
        ]
        for density, k in ((0.001, 100), (0.01, 1000))
        for topk_s in [factor * (ALPHA_S + PER_BYTE_S * 8 * k)]
        for method in deft_cost.METHODS
    }
    rank = {"steps": steps, "numel": 100_000, "cluster": CLUSTER.to_json()}
    return [rank] * WORLD, shaped


def found(*args: Any, **kwargs: Any) -> Findings:
    return deft_cost.cost(
        ASK, LSTM, run=lambda bench, app, report: made(*args, **kwargs)
    )


def test_formula_is_that_of_an_all_gather_of_values_and_indices() -> None:
    row = found().rows[0]
    assert row["formula_bytes"] == 2 * (WORLD - 1) * 100 * 4 == row["counted_bytes"]
    assert row["formula_s"] == pytest.approx(ALPHA_S + PER_BYTE_S * 8 * 100)
    assert row["ratio_of_seconds"] == pytest.approx(1.0)
    assert row["by_verbs_s"] == pytest.approx(row["formula_s"])
    of_deft = next(row for row in found().rows if row["name"] == "deft, 0.01")
    assert (of_deft["num_verbs"], of_deft["counted_bytes"]) == (4, 96_000)


def test_a_run_for_real_counts_what_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch, deft_cost)

    def run(bench: deft_cost.Bench, app: Application, report: Any) -> Any:
        short = (2**10, 2**12, 2**14)
        small = bench._replace(
            sizes=TINY, hosts=2, repeats=1, budget_s=0.01, sizes_bytes=short
        )
        return deft_cost.measure(small, app, report)

    rows = deft_cost.cost(ASK, LSTM, run=run).rows
    assert len(rows) == len(deft_cost.METHODS) * len(deft_cost.DENSITIES)
    for row in rows:
        if row["method"] == "topk":
            near = float(str(row["counted_bytes"])) / float(str(row["formula_bytes"]))
            assert near == pytest.approx(1.0, abs=8 / float(str(row["formula_bytes"])))
        assert (
            0 < float(str(row["counted_bytes"])) <= float(str(row["interface_bytes"]))
        )
    assert deft_cost.draw_cost(rows, tmp_path / "cost.png").exists()
