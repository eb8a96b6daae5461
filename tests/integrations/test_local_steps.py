"""Local steps through each framework's adapter: ranks agree at its checkpoints, and go
on there.

An evaluation changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from operator import ne
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradwire as gw
from gradwire.errors import InvalidSetting
from tests.integrations.loops import (
    RATE,
    batch,
    by_accelerate,
    by_fabric,
    by_lightning,
    by_transformers,
    launched,
    loss_of,
    net,
    restored,
    skip_without,
)
from tests.runtime.local_steps.test_islands import grid
from tests.runtime.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.multi, pytest.mark.timeout(400)]

LOOPS = [by_accelerate, by_fabric, by_lightning, by_transformers]
MOMENTUM = partial(torch.optim.SGD, lr=0.7, momentum=0.5)
LOCK_STEP = partial(gw.local_steps, exchange="topk", every=3, outer=MOMENTUM)
QUORUM = partial(LOCK_STEP, quorum=1)


def parts(
    rank: int,
    world: int,
    train: Callable[..., Any],
    begin: Any,
    folder: str,
    in_hosts: bool = False,
) -> list[Any]:
    """A run of 4 steps, and one that resumes and makes 4 more."""
    first = train(rank, world, begin, folder, 4, False, in_hosts=in_hosts)
    with restored() as loaded:
        second = train(rank, world, begin, folder, 8, True, in_hosts=in_hosts)
    return [first, second, loaded]


def assert_same(found: Any, saved: Any, what: str) -> None:
    """The same bits in the same places, but for the name of the run."""
    if isinstance(saved, dict):
        assert found.keys() == saved.keys(), what
        for key in saved.keys() - {"run"}:
            assert_same(found[key], saved[key], f"{what}, {key}")
    elif isinstance(saved, list | tuple):
        assert len(found) == len(saved), what
        for place, (one, other) in enumerate(zip(found, saved, strict=True)):
            assert_same(one, other, f"{what}, {place}")
    elif isinstance(saved, Tensor):
        assert found.dtype == saved.dtype, what
        assert torch.equal(found, saved), what
    else:
        assert found == saved, what


@pytest.mark.parametrize("begin", [LOCK_STEP, QUORUM], ids=["lock step", "quorum"])
@pytest.mark.parametrize("train", LOOPS)
def test_nothing_is_lost_at_a_checkpoint_of_the_framework(
    train: Callable[..., Any], begin: Any, two: Ranks, tmp_path: Path
) -> None:
    skip_without(train)
    of_ranks = two.run(parts, train, begin, str(tmp_path), timeout_s=300.0)
    for first, second, loaded in of_ranks:
        # accumulated batches are no local steps
        assert (first["step"], second["step"]) == (4, 8)
        assert (first["rate"], second["rate"]) == (RATE, RATE / 2)
        assert_same(loaded, [first["state"]], "the state that is loaded")
        for found, others in ((first, of_ranks[0][0]), (second, of_ranks[0][1])):
            assert_same(found["params"], others["params"], "parameters")
            assert_same(found["params"], found["anchors"], "anchors")
        if begin is QUORUM:
            assert (first["steps of all"], second["steps of all"]) == (8, 16)
        else:
            assert (first["exchanges"], second["exchanges"]) == (2, 2)
        assert first["state"]["outer"]["optimizer"]["state"], "no momentum to lose"
        assert any(bool(left_N.any()) for left_N in first["residuals"].values())


@pytest.mark.parametrize("train", LOOPS)
def test_islands_of_ddp(train: Callable[..., Any], four: Ranks, tmp_path: Path) -> None:
    """A site's ranks step as one; sites step apart until they save."""
    skip_without(train)
    of_ranks = four.run(parts, train, LOCK_STEP, str(tmp_path), True, timeout_s=300.0)
    for place in (0, 1):
        first, beside, other, last = (rank[place] for rank in of_ranks)
        assert len(first["seen"]) == 4
        assert first["seen"] == beside["seen"]
        assert other["seen"] == last["seen"]
        assert all(map(ne, first["seen"], other["seen"]))
        for found in (first, beside, other, last):
            assert (found["step"], found["exchanges"]) == (4 * place + 4, 2)
            assert_same(found["params"], first["params"], "parameters")
            assert_same(found["params"], found["anchors"], "anchors")
    for first, _, loaded in of_ranks:
        assert_same(loaded, [first["state"]], "the state that is loaded")


def by_accelerates_fsdp(rank: int, world: int) -> list[list[Tensor]]:
    """What islands of FSDP2 end with, without Accelerate and by it."""
    launched(rank, world)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from gradwire.integrations.accelerate import prepare

    sites = grid()
    ends = []
    with patch.dict(os.environ):
        for is_plain in (True, False):
            AcceleratorState._reset_state(reset_partial_state=True)
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            # Accelerate takes FSDP on devices alone
            accelerator.state._shared_state |= {
                "distributed_type": DistributedType.FSDP,
                "fsdp_plugin": plugin,
            }
            with pytest.raises(InvalidSetting, match=r"fully_shard\(\) with the mesh"):
                prepare(accelerator, LOCK_STEP)
            model: Any = fully_shard(net(), mesh=sites["shard"])
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
            backward = torch.Tensor.backward
            if not is_plain:
                assert accelerator.state.is_fsdp2
                model, optimizer = accelerator.prepare(model, optimizer)
                assert isinstance(model, FSDPModule)
                backward = accelerator.backward
            handle = LOCK_STEP(model, optimizer, group=sites["site"])
            for step in range(7):
                backward(loss_of(model, batch(step, 0, rank)))
                optimizer.step()
                optimizer.zero_grad()
            handle.end_period()
            assert handle.stats()["exchanges"] == 3
            ends.append([param.full_tensor() for param in model.parameters()])
            handle.detach()
        AcceleratorState._reset_state(reset_partial_state=True)
    return ends


def test_islands_of_accelerates_fsdp2(four: Ranks) -> None:
    """The user cuts the model on the mesh of a site, and Accelerate takes it so."""
    skip_without(by_accelerate)
    of_ranks = four.run(by_accelerates_fsdp, timeout_s=300.0)
    for ends in of_ranks:
        for end in ends:
            assert_same(end, of_ranks[0][0], "parameters")


def evaluates(
    rank: int, world: int, folder: str, train: Callable[..., Any], every: int
) -> None:
    """Trains with an evaluation in each of ``every`` steps, and without any."""
    begin = partial(gw.recipes.localsgd, every=16)
    off: dict[str, Any] = {}
    on: dict[str, Any] = {}
    if train is by_transformers:
        off |= {"save_strategy": "no"}
        on |= {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": every}
    else:
        off |= {"limit_val_batches": 0}
        on |= {"val_check_interval": every}
    alone = train(rank, world, begin, folder, 40, False, **off)
    assert (alone["step"], alone["exchanges"]) == (40, 3)
    assert all(param.isfinite().all() for param in alone["params"])
    found = train(rank, world, begin, folder, 40, False, **on)
    for key in ("step", "exchanges", "params", "anchors"):
        assert_same(found[key], alone[key], key)


@pytest.mark.parametrize(
    ("train", "every"), [(by_transformers, 16), (by_transformers, 5), (by_lightning, 2)]
)
def test_an_evaluation_changes_nothing(
    train: Callable[..., Any], every: int, two: Ranks, tmp_path: Path
) -> None:
    skip_without(train)
    two.run(evaluates, str(tmp_path), train, every)
