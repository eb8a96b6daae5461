"""Local steps with a quorum in Transformers' Trainer, where it does more than train."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from tests.integrations.loops import by_transformers, skip_without
from tests.runtime.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.multi, pytest.mark.timeout(400)]

BEGIN = partial(gw.local_steps, exchange="none", every=3, quorum=1)
BEST = {
    "save_strategy": "best",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "eval_loss",
    "load_best_model_at_end": True,
}


def with_the_best(rank: int, world: int, folder: str) -> tuple[int, list[Tensor]]:
    found = by_transformers(rank, world, BEGIN, folder, 6, False, **BEST)
    assert any(Path(folder).glob("checkpoint-*"))
    return found["step"], found["params"]


def test_the_best_model_is_loaded_at_the_end(two: Ranks, tmp_path: Path) -> None:
    skip_without(by_transformers)
    (step, params), (_, others) = two.run(with_the_best, str(tmp_path), timeout_s=300.0)
    assert step == 6
    assert all(map(torch.equal, params, others))


def warned(rank: int, world: int, folder: str, waits: bool) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("gradwire")
    log.addHandler(handler)
    settings: dict[str, Any] = {"average_tokens_across_devices": waits}
    by_transformers(rank, world, BEGIN, folder, 2, False, **settings)
    log.removeHandler(handler)
    return [text for text in heard if "average_tokens_across_devices" in text]


@pytest.mark.parametrize("waits", [False, True])
def test_a_setting_that_has_ranks_wait_in_each_step_is_warned_of(
    waits: bool, two: Ranks, tmp_path: Path
) -> None:
    skip_without(by_transformers)
    for heard in two.run(warned, str(tmp_path), waits, timeout_s=300.0):
        assert len(heard) == waits
