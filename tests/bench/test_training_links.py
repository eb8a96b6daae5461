"""gradwire bench train --rate: when a method reached DDP's loss, on real ranks."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire_bench.training import training_links
from gradwire_bench.training.trainers import DDP, OTHERS, PERIOD
from gradwire_bench.training.training import TrainBench
from gradwire_bench.training.training_links import (
    Point,
    TrainingOnLinks,
    draw,
    reached,
    run,
)


def bench(
    trained: tuple[str, ...] = (), seeds: int = 1, learning_rates: int = 1
) -> TrainingOnLinks:
    settings = TrainBench(
        tasks=("convnet",),
        optimizers=("sgd",),
        ranks=2,
        steps=2 * PERIOD,
        seeds=seeds,
        learning_rates=learning_rates,
        trained=trained,
    )
    return TrainingOnLinks(bench=settings, rates_bytes_per_s=(1e9, 2e9), goal_step=PERIOD)


def nothing(fraction: float, what: str) -> None:
    """Tells nobody how far it is."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the ranks were asked for; they answer that a method's loss falls from 4 as its rate."""
    calls: list[dict[str, Any]] = []

    @contextmanager
    def hosts(testbed: Any) -> Any:
        calls.append({"link": testbed.rate_bytes_per_s})
        yield SimpleNamespace(shaped=True)

    def ranks(hosts: Any, program: str, settings: dict[str, Any], **others: Any) -> Any:
        calls[-1].update(settings)

        def points(name: str, factor: float) -> list[dict[str, float]]:
            fall = factor if name == DDP else 1 / factor if name == "int8" else 0.1
            at = [(n * PERIOD, 8.0 * n, 64.0 * n, 4 - fall * n) for n in range(3)]
            return [dict(zip(Point._fields, one, strict=True)) for one in at]

        return [[points(*entrant) for entrant in settings["entrants"]]] * 2

    monkeypatch.setattr(training_links, "open_hosts", hosts)
    monkeypatch.setattr(training_links, "run_ranks", ranks)
    return calls


@pytest.mark.smoke
def test_a_row_says_when_the_goal_was_reached(asked: list[dict[str, Any]]) -> None:
    ddp, int8, topk = run(bench(("int8", "topk")), nothing).rows[:3]
    assert (ddp["name"], ddp["goal_loss"], ddp["to_goal_s"]) == (DDP, 3.0, 8.0)
    assert (ddp["speedup_vs_ddp"], ddp["to_goal_steps"], ddp["to_goal_bytes"]) == (1, PERIOD, 64)
    assert (ddp["step_s"], ddp["sent_bytes_per_step"]) == (8 / PERIOD, 64 / PERIOD)
    assert int8["to_goal_s"] == 8.0
    assert topk["to_goal_s"] is topk["speedup_vs_ddp"] is None, "it ends at 3.8"
    assert topk["loss"] == pytest.approx(3.8)


def test_the_line_between_two_scores_is_followed_to_the_goal() -> None:
    points = [Point(0, 0, 0, 5.0), Point(10, 1, 8, 3.0), Point(20, 2, 16, 4.0)]
    assert reached(points, 3.5) == Point(7.5, 0.75, 6.0, 3.5)
    assert reached(points, 3.0) == points[1]
    assert reached(points, 2.9) is None


@pytest.mark.slow
def test_real_ranks_train_by_every_other_trainer(tmp_path: Any) -> None:
    links = TrainingOnLinks(
        bench=TrainBench(
            tasks=("convnet",),
            optimizers=("sgd",),
            ranks=2,
            steps=40,
            trained=(*OTHERS, "dense", "slowmo-4bit@5"),
        ),
        rates_bytes_per_s=(1e9,),
        goal_step=40,
    )
    result = run(links, nothing)
    rows = {row["name"]: row for row in result.rows}
    assert set(rows) == {*OTHERS, "dense", "slowmo-4bit@5"}
    for name in ("dense", "ddp-fp16"):
        assert rows[name]["loss"] == pytest.approx(rows[DDP]["loss"], rel=0.01)
    sent = {name: float(str(row["sent_bytes_per_step"])) for name, row in rows.items()}
    assert sent["ddp-fp16"] < 0.6 * sent[DDP], "unless gloo sent nothing over the interface"
    assert sent["ddp-powersgd"] < 0.3 * sent[DDP]
    assert sent["ddp-local_sgd"] < 0.6 * sent[DDP], "20 dense steps, then one average"
    assert 3 < sent["slowmo-4bit@5"] / sent["slowmo-4bit"] < 5, "four times as many exchanges"
    (curves,) = result.points.values()
    assert all(points[0].loss > points[-1].loss for points in curves.values())
    assert all(path.stat().st_size for path in draw(result, tmp_path))
