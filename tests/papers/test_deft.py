"""DEFT's figures in small: what must hold of any of them, whatever the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from gradwire_bench.workloads.task import Batch, TrainingTask, class_loss, mean_over, random_of
from gradwire_bench.workloads.train import History
from papers.deft import convergence as deft_convergence
from papers.deft import density as deft_density
from papers.deft import error as deft_error
from papers.deft import runs as deft_runs
from papers.deft import setting as deft_setting
from papers.deft import speed as deft_speed
from papers.deft import training as deft_training
from papers.deft.page import deft
from papers.deft.setting import Application
from papers.frame import Ask, Findings
from papers.rows import POINTS

pytestmark = pytest.mark.slow

WIDTH, CLASSES = 16, 4


def draw(step: int, rank: int, world: int, batch: int) -> Batch:
    inputs = torch.randn(batch, WIDTH, generator=random_of(0, step, rank, world))
    return inputs, inputs[:, :CLASSES].argmax(1)


def tiny(batch: int = 4, seed: int = 0, **sizes: object) -> TrainingTask:
    """A task that trains in milliseconds, in place of an application's."""
    held_out = draw(1_000_000, 0, 1, 100)
    return TrainingTask(
        name="argmax",
        description="which input is the largest",
        make_model=lambda: torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
        ),
        make_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        batch=partial(draw, batch=batch),
        loss=class_loss,
        score=lambda model: mean_over(model, class_loss, held_out, 100),
        metric="loss",
        seed=seed,
    )


def small(application: Application) -> Application:
    """The application as the tiny task, whose data are made here."""
    return replace(
        application,
        make=tiny,
        full={"batch": 4},
        quick={"batch": 4},
        density=0.05,
        num_quick_steps=5,
        num_quick_ranks=4,
        missing=lambda: None,
    )


RESNET, LSTM, NCF = APPS = tuple(map(small, deft_setting.APPLICATIONS))
SMALL: dict[str, Callable[[Ask], Findings]] = {
    "figure1": partial(deft_density.figure1, app=RESNET, num_steps=3),
    "figure3": partial(deft_convergence.figure3, apps=APPS),
    "figure4": partial(deft_density.figure4, apps=APPS),
    "figure5": partial(deft_error.figure5, apps=APPS),
    "figure6": partial(deft_error.figure6, apps=(RESNET, LSTM)),
    "figure8": partial(deft_convergence.figure8, app=LSTM),
    "figure10": partial(deft_convergence.figure10, app=LSTM),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests share their trainings as figures do."""
    return tmp_path_factory.mktemp("deft")


@pytest.fixture
def ask(folder: Path) -> Ask:
    return Ask(quick=True, report=lambda fraction, what: None, earlier={}, folder=folder)


def test_every_figure_of_the_issue_is_there() -> None:
    numbers = (1, 3, 4, 5, 6, 7, 8, 9, 10)
    names = [f"figure{n}" for n in numbers]
    names.insert(names.index("figure8"), "cost")
    names.insert(names.index("figure3"), "table1")
    assert [one.name for one in deft.figures] == [*names, "training"]
    for figure in deft.figures:
        assert figure.measure.__name__ == figure.name


@pytest.mark.parametrize("name", SMALL)
def test_a_figure_has_rows_and_claims_that_say_why(name: str, ask: Ask) -> None:
    found = SMALL[name](ask)
    assert found.complete
    assert found.claims
    assert all(POINTS in row for row in found.rows)
    assert all(claim.agrees or claim.why for claim in found.claims)
    unsaid = [claim.says for claim in found.claims if claim.agrees is None]
    assert all(says.startswith(("on 16 workers", "Top-k selects")) for says in unsaid)


def test_figures_share_trainings(ask: Ask, tmp_path: Path) -> None:
    made: list[TrainingTask] = []

    def counted(**sizes: int) -> TrainingTask:
        made.append(tiny(**sizes))
        return made[-1]

    apps = tuple(replace(app, make=counted) for app in APPS)
    ask = replace(ask, folder=tmp_path)
    first = deft_density.figure4(ask, apps=apps)
    assert len(made) == 9  # three sparsifiers, three applications
    deft_error.figure5(ask, apps=apps)
    deft_error.figure6(ask, apps=apps[:2])
    assert len(made) == 11  # and DEFT with more density, twice
    assert deft_density.figure4(ask, apps=apps) == first
    assert len(made) == 11
    assert len(list((tmp_path / deft_runs.FOLDER).glob("*.json"))) == 11


def test_top_k_builds_up_and_the_others_do_not(ask: Ask) -> None:
    rows = SMALL["figure4"](ask).rows
    of_lstm = {row["name"]: row for row in rows if row["application"] == "lstm"}
    assert float(str(of_lstm["topk"]["build_up"])) > 1.5
    assert float(str(of_lstm["cltk"]["build_up"])) == pytest.approx(1, rel=0.05)
    assert float(str(of_lstm["deft"]["build_up"])) < 1.5
    by_ranks = [float(str(row["actual_density"])) for row in SMALL["figure1"](ask).rows]
    assert by_ranks == sorted(by_ranks)


def test_training_compares_every_seed_with_dense_training_of_the_same_seed(ask: Ask) -> None:
    apps = [replace(small(app), num_quick_ranks=2) for app in deft_setting.TRAINED[:2]]
    found = deft_training.training(ask, apps=apps, seeds=(0, 1))
    methods = deft_training.METHODS
    assert [row["name"] for row in found.rows] == [*methods, *methods]
    dense = found.rows[0]
    assert dense["mean_lost"] == dense["most_lost"] == 0.0
    scores = [row["scores"] for row in found.rows[: len(methods)]]
    assert all(isinstance(one, list) and len(one) == 2 for one in scores)
    for row, claim in zip(
        [row for row in found.rows if row["name"] != "dense"], found.claims, strict=True
    ):
        allowed = 0.03 if row["application"] == "lstm, 4 ranks" else 0.005
        assert claim.agrees is None, "the paper states nothing of it"
        assert (": met" in claim.why) is (float(str(row["mean_lost"])) <= allowed)
        assert str(row["name"]) in claim.says


@pytest.mark.parametrize(
    ("less_is_better", "dense", "score", "lost"),
    [(False, 0.9, 0.89, 0.01), (True, 100.0, 103.0, 0.03)],
)
def test_what_counts_as_lost(less_is_better: bool, dense: float, score: float, lost: float) -> None:
    app = replace(deft_setting.TRAINED[0], less_is_better=less_is_better)
    own, theirs = (History(losses=[1.0], actual=[0.1], sent_bytes=[8.0]) for _ in range(2))
    own.scores, theirs.scores = [(1, score)], [(1, dense)]
    row = deft_training._row(app, "topk", 4, {0: own}, {0: theirs})
    assert row["mean_lost"] == pytest.approx(lost)


def test_speedups_by_the_equations() -> None:
    """Two tensors alike, a rank each: n log k against n / 2 log(k / 2), and none where k <= n."""
    numel, k = 2**20, 2**14
    given = deft_speed.Selected(torch.ones(numel), [numel // 2] * 2, k / numel)
    found = deft_speed._expected(given, 2)
    assert found["speedup_by_equation_6"] == pytest.approx(2 * 14 / 13)
    assert found["speedup_by_equation_8"] == pytest.approx(2 * 14 / 13)
    fixed, chosen = 2_000 + 16_384, 8
    whole, part = numel + fixed + chosen * k, numel / 2 + fixed + chosen * k / 2
    assert found["speedup_by_work"] == pytest.approx(whole / (numel + part)), "norms are of all"
    few = deft_speed._expected(deft_speed.Selected(torch.ones(256), [256], 2**-6), 4)
    assert few["speedup_by_equation_8"] is None
    assert few["speedup_by_equation_6"] is None  # k of each part is 1
    speedup = {
        "num_ranks": 4,
        "speedup": 5.0,
        "speedup_without_norms": 6.0,
        "fraction_norms": 0.2,
    }
    _, bounded = deft_speed._speedup_claims([{**few, **speedup}])
    assert "4:" not in bounded.ours
    sublinear = {"speedup_by_equation_6": 3.9, "speedup_by_equation_8": 3.8, "speedup_by_work": 4.0}
    _, bounded = deft_speed._speedup_claims([{**speedup, **sublinear}])
    assert bounded.agrees is False
