"""``runs/outer_steps.py``: learners on a virtual clock, a row for each outer step."""

from __future__ import annotations

import math

import torch

from gradwire.exchange.rounds import Merge
from gradwire_bench.runs import outer_steps
from gradwire_bench.runs.outer_steps import (
    LOCK_STEP,
    OUTER_STEPS,
    Learner,
    Setting,
    loss_of,
    measure,
    rank_of,
)
from gradwire_lab.exchange.virtual_rounds import VirtualClock
from tests.each import each


def test_each_outer_step_has_a_row_with_a_loss_for_each_pace() -> None:
    rows = list(measure([2], [0], Setting(steps=60)))
    assert [row["name"] for row in rows] == [*OUTER_STEPS]
    for row in rows:
        losses = [row[pace] for pace in outer_steps.PACES]
        assert all(isinstance(loss, float) and loss < math.log(256) for loss in losses)


def test_the_same_seed_gives_the_same_loss() -> None:
    setting = Setting(steps=60, pace="1:4", learners=3)
    assert loss_of(setting, 1) == loss_of(setting, 1)


@each("pace, fewest", [(LOCK_STEP, 3), ("1:4", 1)])
def test_all_are_in_each_round_in_lock_step_alone(pace: str, fewest: int) -> None:
    setting = Setting(pace=pace, learners=3)
    learners = [Learner(setting, rank, 0) for rank in range(3)]
    ranks = [rank_of(setting, learner, rank) for rank, learner in enumerate(learners)]
    slow_s = 1.0 if pace == LOCK_STEP else 4.0
    delay_s = 0.0 if pace == LOCK_STEP else 3.0
    clock = VirtualClock(
        ranks,
        step_s=lambda rank: slow_s if rank else 1.0,
        delay_s=lambda source, target, size: delay_s,
    )
    clock.run(60.0)
    lists = [m.contributions for m in clock.sent if isinstance(m, Merge)]
    assert min(map(len, lists)) == fewest


def test_flat_fragments_are_the_models_parameters() -> None:
    learner = Learner(Setting(), 0, 0)
    for flat in learner.flats:
        flat.zero_()
    assert not any(bool(param.any()) for param in learner.model.parameters())
    learner.train(1)
    assert any(bool(torch.any(flat)) for flat in learner.flats)
