"""DEFT: trainings that figures share, densities, what counts as lost, speedups by the
equations.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradwire_bench.workloads.task import TrainingTask
from gradwire_bench.workloads.train import History
from papers.deft import density as deft_density
from papers.deft import error as deft_error
from papers.deft import runs as deft_runs
from papers.deft import setting as deft_setting
from papers.deft import speed as deft_speed
from papers.deft import training as deft_training
from tests.papers.small import APPS, Measured, as_tiny, ask, tiny

pytestmark = pytest.mark.slow


def test_figures_share_trainings(tmp_path: Path) -> None:
    made: list[TrainingTask] = []

    def counted(**sizes: int) -> TrainingTask:
        made.append(tiny(**sizes))
        return made[-1]

    apps = tuple(replace(app, make=counted) for app in APPS)
    first = deft_density.figure4(ask(tmp_path), apps=apps)
    assert len(made) == 9  # three sparsifiers, three applications
    deft_error.figure5(ask(tmp_path), apps=apps)
    deft_error.figure6(ask(tmp_path), apps=apps[:2])
    assert len(made) == 11  # and DEFT with more density, twice
    assert deft_density.figure4(ask(tmp_path), apps=apps) == first
    assert len(made) == len(list((tmp_path / deft_runs.FOLDER).glob("*.json"))) == 11


def test_top_k_builds_up_and_the_others_do_not(measured: Measured) -> None:
    rows = measured("deft", "figure4").rows
    of_lstm = {row["name"]: row for row in rows if row["application"] == "lstm"}
    assert float(str(of_lstm["topk"]["build_up"])) > 1.5
    assert float(str(of_lstm["cltk"]["build_up"])) == pytest.approx(1, rel=0.05)
    assert float(str(of_lstm["deft"]["build_up"])) < 1.5
    by_ranks = [
        float(str(row["actual_density"])) for row in measured("deft", "figure1").rows
    ]
    assert by_ranks == sorted(by_ranks)


def test_training_compares_every_seed_with_dense_training_of_the_same_seed(
    folder: Path,
) -> None:
    apps = [
        replace(as_tiny(app), num_quick_ranks=2) for app in deft_setting.TRAINED[:2]
    ]
    found = deft_training.training(ask(folder), apps=apps, seeds=(0, 1))
    assert [row["name"] for row in found.rows] == 2 * [*deft_training.METHODS]
    dense = found.rows[0]
    assert dense["mean_lost"] == dense["most_lost"] == 0.0
    assert all(
        isinstance(row["scores"], list) and len(row["scores"]) == 2
        for row in found.rows
    )
    others = [row for row in found.rows if row["name"] != "dense"]
    for row, claim in zip(others, found.claims, strict=True):
        allowed = 0.03 if row["application"] == "lstm, 4 ranks" else 0.005
        assert claim.agrees is None, "the paper states nothing of it"
        assert (": met" in claim.why) is (float(str(row["mean_lost"])) <= allowed)
        assert str(row["name"]) in claim.says


@pytest.mark.parametrize(
    ("less_is_better", "dense", "score", "lost"),
    [(False, 0.9, 0.89, 0.01), (True, 100.0, 103.0, 0.03)],
)
def test_what_is_lost_counts_against_the_scores_direction(
    less_is_better: bool, dense: float, score: float, lost: float
) -> None:
    app = replace(deft_setting.TRAINED[0], less_is_better=less_is_better)
    own, theirs = (
        History(losses=[1.0], actual=[0.1], sent_bytes=[8.0]) for _ in range(2)
    )
    own.scores, theirs.scores = [(1, score)], [(1, dense)]
    row = deft_training._row(app, "topk", 4, {0: own}, {0: theirs})
    assert row["mean_lost"] == pytest.approx(lost)


def test_speedups_follow_equations_6_and_8() -> None:
    """Two tensors alike, a rank each: n log k against n / 2 log(k / 2), and none where
    k <= n.
    """
    numel, k = 2**20, 2**14
    given = deft_speed.Selected(torch.ones(numel), [numel // 2] * 2, k / numel)
    found = deft_speed._expected(given, 2)
    assert found["speedup_by_equation_6"] == pytest.approx(2 * 14 / 13)
    assert found["speedup_by_equation_8"] == pytest.approx(2 * 14 / 13)
    fixed, chosen = 2_000 + 16_384, 8
    whole, part = numel + fixed + chosen * k, numel / 2 + fixed + chosen * k / 2
    assert found["speedup_by_work"] == pytest.approx(whole / (numel + part)), (
        "norms are of all"
    )
    few = deft_speed._expected(deft_speed.Selected(torch.ones(256), [256], 2**-6), 4)
    # k of a part is 1
    assert few["speedup_by_equation_8"] is few["speedup_by_equation_6"] is None
