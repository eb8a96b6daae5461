"""gradwire bench train --rate: when a method reached DDP's loss, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire_bench.training import training_links
from gradwire_bench.training.trainers import DDP, OTHERS, PERIOD
from gradwire_bench.training.training import TrainBench
from gradwire_bench.training.training_links import (
    Point,
    TrainingOnLinks,
    _rows,
    draw,
    reached,
    run,
)
from tests.bench.testbed.forked import run_instead


@pytest.mark.smoke
def test_a_row_says_when_the_goal_was_reached() -> None:
    """At DDP's loss of the goal step: the second twice as fast, the third never."""
    bench = TrainBench(tasks=("convnet",), optimizers=("sgd",), steps=2 * PERIOD)
    links = TrainingOnLinks(bench=bench, rates_bytes_per_s=(1e9,), goal_step=PERIOD)

    def points(fall: float, step_s: float) -> list[Point]:
        return [
            Point(n * PERIOD, step_s * n * PERIOD, 64.0 * n, 4 - fall * n)
            for n in range(3)
        ]

    found = [[points(1.0, 0.2), points(1.0, 0.1), points(0.1, 0.2)]]
    ddp, int8, topk = _rows(links, [(DDP, 1.0), ("int8", 0.5), ("topk", 1.0)], found)
    assert (ddp["name"], ddp["goal_loss"], ddp["to_goal_s"]) == (DDP, 3.0, 0.2 * PERIOD)
    assert (ddp["speedup_vs_ddp"], ddp["to_goal_steps"], ddp["to_goal_bytes"]) == (
        1,
        PERIOD,
        64,
    )
    assert (ddp["step_s"], ddp["sent_bytes_per_step"]) == (
        pytest.approx(0.2),
        64 / PERIOD,
    )
    assert (int8["speedup_vs_ddp"], int8["times_rate"]) == (pytest.approx(2.0), 0.5)
    assert topk["to_goal_s"] is topk["speedup_vs_ddp"] is None, "it ends at 3.8"
    assert topk["loss"] == pytest.approx(3.8)


def test_the_line_between_two_scores_is_followed_to_the_goal() -> None:
    points = [Point(0, 0, 0, 5.0), Point(10, 1, 8, 3.0), Point(20, 2, 16, 4.0)]
    assert reached(points, 3.5) == Point(7.5, 0.75, 6.0, 3.5)
    assert reached(points, 3.0) == points[1]
    assert reached(points, 2.9) is None


@pytest.mark.slow
def test_real_ranks_train_by_every_other_trainer(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead(monkeypatch, training_links, "tests.bench.small_training_rank")
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
    result = run(links, lambda fraction, what: None)
    rows = {row["name"]: row for row in result.rows}
    assert set(rows) == {*OTHERS, "dense", "slowmo-4bit@5"}
    for name in ("dense", "ddp-fp16"):
        assert rows[name]["loss"] == pytest.approx(rows[DDP]["loss"], rel=0.01)
    sent = {name: float(str(row["sent_bytes_per_step"])) for name, row in rows.items()}
    assert sent["ddp-fp16"] < 0.6 * sent[DDP], (
        "unless gloo sent nothing over the interface"
    )
    assert sent["ddp-powersgd"] < 0.3 * sent[DDP]
    assert sent["ddp-local_sgd"] < 0.6 * sent[DDP], "20 dense steps, then one average"
    assert 3 < sent["slowmo-4bit@5"] / sent["slowmo-4bit"] < 5, (
        "four times as many exchanges"
    )
    (curves,) = result.points.values()
    assert all(points[0].loss > points[-1].loss for points in curves.values())
    assert all(path.stat().st_size for path in draw(result, tmp_path))
