"""bench auto: its cells, and the rows that follow from what ranks measured."""

from __future__ import annotations

import pytest
import torch

from gradwire.bench.auto import MODELS, AutoBench, rows_of
from gradwire.bench.tasks import make_task
from gradwire.errors import InvalidSetting


def test_single_choices_are_those_of_the_fidelity_and_the_dense_one() -> None:
    assert AutoBench(fidelity="exact").others == ("none", "lossless")
    assert AutoBench(fidelity="half").others == ("none", "cast16")
    assert AutoBench(singles=("int8",)).others == ("none", "int8")


@pytest.mark.parametrize(
    "given", [{"models": ("vgg16",)}, {"hosts": 1}, {"steps": 1}, {"fidelity": "best"}]
)
def test_cells_that_cannot_be_measured_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        AutoBench(**given)  # type: ignore[arg-type]


def test_a_step_takes_as_long_as_on_the_slowest_rank() -> None:
    seconds = {"ddp": [0.4, 0.4], "auto": [0.1, 0.1], "none": [0.3, 0.3], "int8": [0.2, 0.2]}
    late = {**seconds, "auto": [0.2, 0.2]}
    ranks = [{"step_s": one, "pilot": {"predicted_s": 0.25}} for one in (seconds, late)]
    rows = {row["name"]: row for row in rows_of(AutoBench(singles=("int8",)), "lstm", None, ranks)}
    auto = rows["auto"]
    assert (auto["step_s"], auto["speedup_vs_ddp"], auto["speedup_vs_best_single"]) == (0.2, 2, 1)
    assert auto["fraction_error"] == pytest.approx(0.25)
    assert rows["ddp"]["predicted_s"] is None


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_from_its_batches(model: str) -> None:
    task = make_task(MODELS[model])
    torch.manual_seed(0)
    net = task.make_model()
    loss = task.loss(net, *task.batch(0, 0, 4))
    loss.backward()
    assert all(param.grad is not None for param in net.parameters())
    assert not torch.equal(task.batch(0, 0, 4)[0], task.batch(0, 1, 4)[0])
