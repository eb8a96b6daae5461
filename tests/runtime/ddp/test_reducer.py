"""Where all gradients of a DDP model are dense, DDP's own reducer averages them and we
count.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import gradwire as gw
from gradwire.collective.steps.travel import bytes_sent
from gradwire.runtime.controls import Controls, Flight, Pilot
from gradwire.runtime.engine.engine import figures_of_all
from tests.runtime.given import keywords
from tests.runtime.models import Branches, Words
from tests.runtime.ranks import Ranks
from tests.runtime.test_copies import hooks
from tests.runtime.training import (
    DENSE,
    ONEBIT,
    Net,
    adamw,
    ddp,
    digest,
    loss_of,
    train,
)

pytestmark = pytest.mark.multi


def averaged_by(model: nn.Module, *given: Any, **settings: Any) -> str:
    handle = gw.attach(model, *given, **keywords(**settings))
    found: str = handle.stats()["averaged_by"]
    handle.detach()
    return found


def choices(rank: int, world: int) -> tuple[dict[str, str], str, str]:
    """Who averages which model; what is said of a user's hook, and where ranks
    disagree.
    """
    found = {
        "dense": averaged_by(ddp(Net()), "none"),
        "nothing to compress": averaged_by(
            ddp(Net()), ONEBIT, compress_if=lambda *_: False
        ),
        "a matrix to compress": averaged_by(ddp(Net()), ONEBIT),
        "a size": averaged_by(ddp(Net()), DENSE, bucket_cap_mb=1),
        "a back end": averaged_by(ddp(Net()), DENSE, backend="gloo"),
        "rows": averaged_by(ddp(Words()), DENSE),
    }
    hooked = ddp(Net())
    hooked.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(gw.InvalidSetting) as refused:
        gw.attach(hooked, DENSE)
    settings: dict[str, Any] = {"num_channels": 4} if rank else {}
    with pytest.raises(gw.RanksDiffer) as differ:
        gw.attach(ddp(Net()), DENSE, **keywords(**settings))
    return found, str(refused.value), str(differ.value)


def test_only_what_is_dense_throughout_is_left_to_ddp(two: Ranks) -> None:
    one, other = two.run(choices)
    assert one[0] == other[0]
    left = {name for name, by in one[0].items() if by == "DDP"}
    assert left == {"dense", "nothing to compress"}
    for _, refused, differ in (one, other):
        assert "fp16_compress_hook" in refused
        assert "left to DDP" in differ


def nothing_runs(rank: int, world: int) -> tuple[set[str], dict[str, Any], int, bool]:
    model = ddp(Net())
    usual = hooks(model)
    before = set(threading.enumerate())
    handle = gw.attach(model, DENSE)
    threads = {one.name for one in set(threading.enumerate()) - before}
    optimizer = adamw(model.parameters())
    train(model, optimizer, rank, range(3))
    with handle.no_sync():
        loss_of(model, rank, 3).backward()
    with torch.no_grad():
        loss_of(model, rank, 3)
    loss_of(model, rank, 3)  # and never its backward pass
    train(model, optimizer, rank, [4])
    stats, lanes = handle.stats(), {span.lane for span in handle.trace().spans}
    assert lanes == {"forward", "backward", "wait"}
    handle.detach()
    numel = sum(p.numel() for p in model.parameters())
    return (
        threads,
        stats,
        bytes_sent("all_reduce", 4 * numel, world),
        hooks(model) == usual,
    )


def test_nothing_runs_but_a_count_and_the_pulse(two: Ranks) -> None:
    for threads, stats, step_bytes, is_as_before in two.run(nothing_runs):
        assert threads - {"gradwire roll call"} == {"gradwire pulse"}
        assert (stats["steps"], stats["messages"]) == (4, 0)
        assert stats["wire_bytes_per_step"] == step_bytes
        assert is_as_before


def switching(rank: int, world: int) -> list[str]:
    """DDP's reducer, then onebit, then its reducer again with the state that it saved,
    then DDP.
    """
    found = []
    for is_attached in (True, False):
        model = ddp(Net())
        optimizer = adamw(model.parameters())
        first = gw.attach(model, DENSE) if is_attached else None
        train(model, optimizer, rank, range(3))
        saved = first.state_dict() if first else {}
        if first:
            first.detach()
        optimizer.zero_grad()
        second = gw.attach(model, ONEBIT)
        train(model, optimizer, rank, range(3, 6))
        assert second.stats()["residual_norm"] > 0
        second.detach()
        optimizer.zero_grad()
        third = gw.attach(model, DENSE) if is_attached else None
        if third:
            third.load_state_dict(saved)
            assert third.step == 3
        train(model, optimizer, rank, range(6, 9))
        if third:
            assert third.step == 6
            third.detach()
        train(model, optimizer, rank, range(9, 11))
        found.append(digest(model))
    return found


def test_what_is_left_to_ddp_can_be_taken_back_and_left_again(two: Ranks) -> None:
    one, other = two.run(switching)
    assert one == other
    assert one[0] == one[1], "the same bits as with DDP alone in those steps"


def uneven(rank: int, world: int) -> tuple[int, int]:
    model = ddp(Net())
    handle = gw.attach(model, DENSE)
    optimizer = adamw(model.parameters())
    with model.join():
        train(model, optimizer, rank, range(2 + 2 * rank))
    handle.load_state_dict(handle.state_dict())
    joined = handle.step
    train(model, optimizer, rank, range(1))
    return joined, handle.step


def test_a_rank_that_has_joined_counts_the_steps_of_others(two: Ranks) -> None:
    assert two.run(uneven) == [(4, 5), (4, 5)]


@dataclass(frozen=True)
class Telling(Pilot):
    """Has ranks tell each other something at the end of every step."""

    def begin(self, controls: Controls) -> Flight:
        return OnTelling(controls)


class OnTelling(Flight):
    def __init__(self, controls: Controls) -> None:
        self.controls = controls

    def step_ended(self) -> None:
        assert figures_of_all(self.controls.engine, [1.0]) == [[1.0], [1.0]]

    def stats(self) -> dict[str, Any]:
        return {}

    def end(self) -> None:
        """Nothing is left."""


def telling(rank: int, world: int) -> list[int]:
    """Steps with a pilot that tells, and steps without some parameters."""
    found = []
    for finds_unused in (False, True):
        model = ddp(Net(), find_unused_parameters=finds_unused)
        handle = gw.attach(model, Telling())
        with model.join():
            train(model, adamw(model.parameters()), rank, range(2 + 2 * rank))
        found.append(handle.step)
        handle.detach()
    model = ddp(
        Branches(lambda step: (step % 2 == 0, step % 2 == 1)),
        find_unused_parameters=True,
    )
    handle = gw.attach(model, DENSE)
    train(model, adamw(model.parameters()), rank, range(4))
    return [*found, handle.step]


def test_ranks_that_have_joined_tell_and_steps_without_parameters_count(
    two: Ranks,
) -> None:
    assert two.run(telling) == [[4, 4, 4]] * 2


def among_three(rank: int, world: int) -> list[str]:
    """DDP alone, left to DDP, and after a detach, when gradwire's hook stays; 1/3 is no
    power.
    """
    group = dist.new_group([0, 1, 2])
    if rank == 3:
        return []
    found = []
    for exchange in (None, DENSE, ONEBIT):
        model = ddp(Net(), process_group=group)
        handle = gw.attach(model, exchange) if exchange is not None else None
        if handle is not None and exchange is ONEBIT:
            handle.detach()
        train(model, adamw(model.parameters()), rank, range(4))
        found.append(digest(model))
    return found


def test_the_bits_are_those_of_ddp_among_any_number_of_ranks(four: Ranks) -> None:
    *three, _ = four.run(among_three)
    assert len({bits for found in three for bits in found}) == 1
