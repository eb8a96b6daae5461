"""``papers/local_steps/outer_steps.py``: learners on a virtual clock, a row for each
outer step.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn
from torch.optim import SGD

from gradwire.exchange.rounds import Merge
from gradwire_lab.exchange.virtual_rounds import VirtualClock
from papers.local_steps.outer_steps import (
    LOCK_STEP,
    MODELS,
    OUTER_STEPS,
    PACES,
    SENT,
    DelayedNesterov,
    Learner,
    Setting,
    loss_of,
    measure,
    rank_of,
    rows_of,
    settings_of,
)
from tests.each import each


def test_each_outer_step_has_a_row_with_a_loss_for_each_pace() -> None:
    settings = [s for s in settings_of([2], 2) if s.model == "gpt"]
    rows = measure(settings, [0])
    assert [row["name"] for row in rows] == [*OUTER_STEPS]
    for row in rows:
        assert all(isinstance(row[pace], float) for pace in PACES)


def test_losses_are_compared_with_lock_step_and_with_the_best_of_it() -> None:
    half = Setting(outer="plain, lr 0.5")
    losses = {
        Setting(): [2.0, 3.0, 1.0],
        half: [4.0],
        replace(half, pace="1:4"): [5.0],
        replace(half, pace="1:4", merge="rda"): [6.0],
        replace(half, pace="1:4", sent="2 bits"): [8.0],
    }
    best, own, rda, bits = rows_of(losses)
    assert (best[LOCK_STEP], best["lock step, range"]) == (2.0, 2.0)
    assert (own["1:4, % over lock step"], own["1:4, % over best"]) == (25.0, 150.0)
    assert (rda["1:4, % over lock step"], rda["1:4, % over best"]) == (50.0, 200.0)
    assert (bits["1:4, % over lock step"], bits["1:4, % over best"]) == (100.0, 300.0)


@each("model", list(MODELS))
def test_the_same_seed_gives_the_same_loss(model: str) -> None:
    setting = Setting(steps=20, pace="1:4", learners=3, model=model)
    first = loss_of(setting, 1)
    assert first == loss_of(setting, 1) != loss_of(setting, 2)
    assert first < math.log(256)


def test_every_setting_of_bits_trains() -> None:
    for sent in SENT:
        loss = loss_of(Setting(steps=12, sent=sent, pace="1:4", model="lstm"), 0)
        assert loss < math.log(256), sent


def test_residuals_are_kept_only_where_a_setting_says_so() -> None:
    for sent, way in SENT.items():
        setting = Setting(sent=sent)
        rounds = rank_of(setting, Learner(setting, 0, 0), 0).rounds
        codecs = [learner.codec for learner in rounds.learners]
        codecs += [owner.codec for owner in rounds.owners.values()]
        assert {codec.residual_N is not None for codec in codecs} == {way.is_kept}


def test_delayed_nesterov_of_one_step_is_nesterov() -> None:
    """Torch's momentum begins with the first gradient, and so does this one's."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [
        DelayedNesterov(params[:1], lr=0.7, momentum=0.9, every=1),
        SGD(params[1:], lr=0.7, momentum=0.9, nesterov=True),
    ]
    for step in range(4):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.tensor([1.0, -2.0, step])
            optimizer.step()
    torch.testing.assert_close(params[0], params[1])


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
    learner = Learner(Setting(model="lstm"), 0, 0)
    for flat in learner.flats:
        flat.fill_(0.5)
    assert all(bool((param == 0.5).all()) for param in learner.model.parameters())
    learner.train(1)
    assert any(bool(torch.any(flat != 0.5)) for flat in learner.flats)
