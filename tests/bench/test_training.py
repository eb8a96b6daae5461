"""gradwire bench train: real losses and bytes of small models, each method beside
dense.
"""

from __future__ import annotations

from typing import Any

import pytest

import gradwire as gw
from gradwire.errors import InvalidSetting
from gradwire_bench.auto.auto import MODELS
from gradwire_bench.training import training
from gradwire_bench.training.methods import method
from gradwire_bench.training.tasks import TASKS, make_task
from gradwire_bench.training.training import TrainBench, hidden, run
from gradwire_bench.workloads.train import History
from tests.each import each


@pytest.mark.smoke
def test_losses_and_bytes_stand_beside_those_of_dense() -> None:
    dense, cast16, onebit = run(
        TrainBench(ranks=2, steps=10, trained=("cast16", "onebit"))
    )
    assert [row["name"] for row in (dense, cast16, onebit)] == [
        "dense",
        "cast16",
        "onebit",
    ]
    assert dense["loss_over_dense"] == dense["sent_over_dense"] == 1
    assert 0.5 < float(str(cast16["sent_over_dense"])) < 0.52, (
        "vectors travel uncompressed"
    )
    assert float(str(onebit["sent_over_dense"])) < 0.07
    assert cast16["loss_over_dense"] == pytest.approx(1, abs=0.01)
    assert onebit["loss_over_dense"] != 1


def test_a_compressor_is_named_with_settings_and_adapted() -> None:
    task = make_task("gpt")
    given = method("topk(density=0.02)")(task, 100).exchange
    assert given == gw.exchange_for(gw.compress.topk(density=0.02))
    adapted = method("adapt:topk(density=0.02)")(task, 100).exchange
    assert adapted == gw.adapt(gw.compress.topk(density=0.02), every=10)
    for wrong in (
        "adapt:dense",
        "topk(",
        "topk(0.02)",
        "adapt:adapt:topk",
        "topk(density=1e9)",
    ):
        with pytest.raises(InvalidSetting):
            method(wrong)


def test_the_same_command_gives_the_same_losses() -> None:
    bench = TrainBench(ranks=2, steps=10, trained=("terngrad",))
    assert run(bench) == run(bench)


def test_each_method_has_its_best_rate_of_the_same_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other seeds are trained at that rate alone, and the row is the mean over all
    seeds.
    """
    best = {"none": 0.5, "dense": 2.0}
    asked = []

    def loss_of(task: str, optimizer: str, *, times_rate: float, seed: int) -> Any:
        asked.append((times_rate, seed))
        return times_rate, seed

    def method(name: str) -> Any:
        return lambda made, num_steps: Trained(name, *made)

    class Trained:
        exchange = None

        def __init__(self, name: str, rate: float, seed: int) -> None:
            self.task = abs(rate - best[name]) + 1 + seed

    def train(loss: float, exchange: None, **settings: Any) -> History:
        return History(sent_bytes=[8.0], scores=[(10, loss)])

    monkeypatch.setattr(training, "make_task", loss_of)
    monkeypatch.setattr(training, "method", method)
    monkeypatch.setattr(training, "train", train)
    dense, none = run(
        TrainBench(steps=10, seeds=3, learning_rates=3, trained=("none",))
    )
    assert asked[:5] == [(1.0, 0), (0.5, 0), (2.0, 0), (2.0, 1), (2.0, 2)]
    assert asked[5:] == [(1.0, 0), (0.5, 0), (2.0, 0), (0.5, 1), (0.5, 2)]
    assert (dense["times_rate"], none["times_rate"]) == (2.0, 0.5)
    assert (none["loss"], none["loss_low"], none["loss_high"]) == (2.0, 1.0, 3.0)
    bench = TrainBench(
        tasks=("convnet", "lstm"),
        optimizers=("sgd", "adamw"),
        steps=10,
        trained=("none",),
    )
    rows = run(bench)
    kinds = [
        ("convnet", "sgd"),
        ("convnet", "adamw"),
        ("lstm", "sgd"),
        ("lstm", "adamw"),
    ]
    assert [(row["task"], row["optimizer"]) for row in rows[1::2]] == kinds
    assert [row["name"] for row in rows] == ["dense", "none"] * 4
    assert not {"task", "optimizer"} & hidden(bench)
    assert "times_rate" in hidden(bench)


@each("name", sorted({*TASKS, *MODELS.values()} - {"fashion"}))
def test_a_seed_draws_batches_and_the_held_out_examples_stay(name: str) -> None:
    first, second = make_task(name, seed=0), make_task(name, seed=1)
    inputs, targets = first.batch(0, 0, 2)
    others, _ = second.batch(0, 0, 2)
    assert inputs.shape == others.shape
    assert not (inputs == others).all()
    assert len(inputs) == len(targets)
    model = first.make_model()
    assert first.score(model) == second.score(model)
