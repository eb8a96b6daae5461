"""bench auto: its cells, and the rows that follow from what ranks measured."""

from __future__ import annotations

import pytest
import torch

from gradwire_bench.auto.auto import MODELS, AutoBench, cells_table, rows_of
from gradwire_bench.training.tasks import make_task
from tests.each import each


def test_a_rank_that_is_late_in_one_step_and_early_in_the_next_is_no_slower() -> None:
    """As ranks are whose next forward pass is overlapped."""
    seconds = {"ddp": [0.4, 0.4], "auto": [0.1, 0.3], "none": [0.3, 0.3], "int8": [0.2, 0.2]}
    late = {**seconds, "auto": [0.3, 0.1]}
    bench = AutoBench(models=("lstm",), rates=(None,), singles=("int8",), rounds=2)
    ranks = [
        {
            "turns_s": {
                name: [own, [0.5 * step_s for step_s in own]] for name, own in each.items()
            },
            "core_s": dict.fromkeys(each, 0.3),
            "num_cores": 2,
            "pilot": {"predicted_s": 0.1875},
        }
        for each in (seconds, late)
    ]
    rows = {row["name"]: row for row in rows_of(bench, "lstm", None, ranks)}
    auto = rows["auto"]
    assert auto["step_s"] == pytest.approx(0.15)
    assert auto["fraction_of_cores"] == pytest.approx(0.6 / (2 * 0.6))
    assert auto["speedup_vs_ddp"] == pytest.approx(2)
    assert auto["speedup_vs_best_single"] == pytest.approx(1)
    assert auto["fraction_error"] == pytest.approx(0.25)
    assert rows["ddp"]["predicted_s"] is None
    told = "2.00 (2.00 to 2.00), int8 2.00, +25 %, cores 50 %"
    assert cells_table(bench, list(rows.values())).splitlines() == [
        "| | loopback |",
        "| --- | --- |",
        f"| lstm | {told} |",
    ]


@each("model", MODELS)
def test_every_model_learns_from_its_batches(model: str) -> None:
    task = make_task(MODELS[model])
    torch.manual_seed(0)
    net = task.make_model()
    loss = task.loss(net, *task.batch(0, 0, 4))
    loss.backward()
    assert all(param.grad is not None for param in net.parameters())
    assert not torch.equal(task.batch(0, 0, 4)[0], task.batch(0, 1, 4)[0])
