"""What ranks report to each other beside gradients, and how a step is confirmed and
undone.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.contract.state import leaves
from gradwire.contract.verbs import Compute, Steps
from gradwire.errors import RankFailed
from gradwire.exchange.local import drive
from gradwire.runtime.device.streams import Streams
from gradwire.runtime.engine.engine import Launch
from gradwire.runtime.step.layout import ParamRange
from gradwire.runtime.step.messages import Message
from gradwire.runtime.step.report import Check, Record, StepReport
from gradwire.runtime.step.synchroniser import Synchroniser
from gradwire.runtime.transport.task_graph import Task
from tests.each import each
from tests.runtime.training import DENSE, TOPK

WORLDS = (2, 3, 5, 6)
PARTS = ("part 0", "part 1", "part 2")


def reports(world: int) -> list[StepReport]:
    return [StepReport(Check(None, lambda names: []), world) for _ in range(world)]


def test_a_record_is_the_same_behind_the_wire() -> None:
    for trains, used in product((False, True), (b"", b"\1\0\1")):
        record = Record(0.5, 64, 3, trains, (7, -(2**63)), used)
        assert Record.of(record.packed(), 2) == record


@each("world", WORLDS)
def test_a_parameter_that_one_rank_used_is_used_on_all(world: int) -> None:
    all_ranks = reports(world)
    all_steps = []
    for rank, one in enumerate(all_ranks):
        used = bytes([rank == 1, 0, rank == world - 1, 1])
        all_steps.append(one.steps(0, used, {}))
    drive(all_steps)
    assert [one.used for one in all_ranks] == [[True, False, True, True]] * world


def answers(world: int, changed: dict[int, int]) -> list[RankFailed | None]:
    """What each rank makes of the digests, of which some ranks have changed one."""

    all_ranks = reports(world)

    def steps(rank: int) -> Steps[RankFailed | None]:
        digests = [7, -3, 2**62]
        if rank in changed:
            digests[changed[rank]] += 1
        try:
            yield from all_ranks[rank].steps(
                4, b"", dict(zip(PARTS, digests, strict=True))
            )
        except RankFailed as failure:
            return failure
        return None

    return drive([steps(rank) for rank in range(world)]).results


@each("world", WORLDS)
def test_digests_of_all_ranks_are_compared_on_all(world: int) -> None:
    assert answers(world, {}) == [None] * world
    for odd, part in product(range(world), range(3)):
        for failure in answers(world, {odd: part}):
            assert failure is not None, f"nobody told rank {odd}'s part {part} apart"
            assert (failure.ranks, failure.step) == ((odd,) if world > 2 else (), 4)
            assert f"part {part}" in str(failure)


def messages(num: int, rank: int, world: int) -> list[Message]:
    weights = [(f"weight {i}", torch.zeros(4, 10)) for i in range(num)]
    return [
        Message(i, [ParamRange.whole(*one)], TOPK, rank, world)
        for i, one in enumerate(weights)
    ]


@each("world", WORLDS)
def test_all_ranks_know_every_ranks_norm_and_the_newcomer_that_rank_0_has_seen(
    world: int,
) -> None:
    all_ranks = reports(world)
    for rank, report in enumerate(all_ranks):
        report.look = lambda rank=rank: 40 + rank  # type: ignore[misc]
    for step, factor in ((1, 1.0), (2, 2.0), (3, 9.0)):
        all_steps = []
        for rank, report in enumerate(all_ranks):
            own = messages(2, rank, world)
            for message in own:
                message.state.residual_N.fill_(factor * (rank + 1))
            all_steps.append(report.confirmation(step - 1, b"", own, Streams()))
        drive(all_steps, seed=step)
        at = min(step, 2)  # the norm is told anew after 1, 2, 4 and more steps
        for report in all_ranks:
            assert report.newcomer == 40
            for rank in range(world):
                assert report.records[rank].num_steps == at
                assert report.records[rank].norm == pytest.approx(
                    at * (rank + 1) * 80**0.5
                )


def test_what_does_not_count_leaves_no_trace() -> None:
    """The state of every message that was begun is as before, whether its exchange
    ended or not.
    """
    own = messages(4, 0, 2)
    own[3].lanes = {own[3].names[0]: "compute"}  # encoded ahead, before its steps begin
    for message in own:
        message.state.residual_N.copy_(torch.arange(40.0) + message.index)
    before = [[t.clone() for _, t in leaves(message.state)] for message in own]
    # a step undone, one that nothing was begun in, and another
    for num_begun in (
        3,
        0,
        1,
    ):
        for message in own:
            message.begin_step(looks=False)
        for message in own[:num_begun]:
            steps = message.steps({message.names[0]: torch.ones(4, 10)})
            verb = next(steps)
            # until it waits for others, who have sent nothing
            while isinstance(verb, Compute):
                verb = steps.send(verb.fn())
            message.state.residual_N.fill_(-2.0)
        own[3].state.residual_N.fill_(-1.0)
        for message in own:
            message.backup.end_pass(undoes=True)
        for message, were in zip(own, before, strict=True):
            for (_, tensor), was in zip(leaves(message.state), were, strict=True):
                assert torch.equal(tensor, was), (num_begun, message.index)


class Quiet:
    """An engine among three ranks that launches nothing, and notes what it was to
    launch.
    """

    rank, world = 0, 3

    def __init__(self) -> None:
        self.launched: dict[str, tuple[Task, tuple[Task, ...]]] = {}
        self.asked: dict[str, Launch] = {}
        self.waited: list[Task] = []

    def launch(self, index: int, name: str, text: Any, how: Launch) -> Task:
        task = Task(name, lambda: None)
        self.launched[name] = (task, tuple(how.behind))
        self.asked[name] = how
        return task

    def wait(self, ends: list[Task]) -> None:
        self.waited = ends

    def begin(self, task: Task) -> Task:
        return task

    def check(self) -> None: ...

    def begin_step(self, step: int, *, launched: int = 0) -> None: ...


@each("num", [1, 2, 5])
def test_a_step_is_confirmed_once_all_of_it_is_there(num: int) -> None:
    """Ranks confirm behind every message and report; until all of these end no step is
    whole.
    """
    engine, own = Quiet(), messages(num, 0, 3)
    params: dict[str, Tensor] = {
        name: torch.zeros(4, 10) for one in own for name in one.names
    }
    synchroniser = Synchroniser(engine, own, params)  # type: ignore[arg-type]
    synchroniser.counts_use = synchroniser.report.confirms = True
    synchroniser.begin(0)
    for name in params:
        assert not synchroniser.is_whole
        synchroniser.ready(name, torch.ones(4, 10))
    synchroniser.close()
    commit, behind = engine.launched.pop("confirmation")
    others = [task for task, _ in engine.launched.values()]
    assert len(others) == num + 1  # and the count of who used which parameter
    assert {*map(id, others)} == {*map(id, behind)}
    synchroniser.finish()
    assert {*map(id, engine.waited)} == {*map(id, (commit, *others))}
    synchroniser.open = True
    for last in others:
        for task in others:
            task.done = task is not last
        assert not synchroniser.is_whole, f"whole without {last.name}"
    last.done = True
    assert synchroniser.is_whole


@each("scale", [1.0, 8.0])
def test_a_message_waits_for_what_the_plan_says_and_for_who_looks_at_its_gradient(
    scale: float,
) -> None:
    """A gradient that others look at, or that is scaled, is copied, and written after
    backward.
    """
    engine, own = Quiet(), messages(3, 0, 3)
    own[2].after = (0,)
    params = {name: torch.zeros(4, 10) for one in own for name in one.names}
    synchroniser = Synchroniser(engine, own, params)  # type: ignore[arg-type]
    synchroniser.begin(0, scale)
    for place, name in enumerate(params):
        synchroniser.ready(name, torch.ones(4, 10), is_shared=place == 1)
    first, shared, last = (engine.asked[f"message {place}"] for place in range(3))
    assert [*last.after] == [engine.launched["message 0"][0]]
    assert not [*first.after, *shared.after]
    assert [one.name for one in shared.last_behind] == ["backward over"]
    assert not [*first.last_behind, *last.last_behind]
    assert [one.last is None for one in (first, shared, last)] == [
        scale == 1,
        False,
        scale == 1,
    ]
    assert [one.buffer.scale for one in own] == [scale] * 3


def test_a_gradient_that_is_none_counts_as_zero() -> None:
    """Also after steps in which it was there; one with strides of its own is copied."""
    parts = [ParamRange.whole(name, torch.zeros(4, 10)) for name in ("one", "other")]
    both = [Message(0, parts, DENSE, rank, 2) for rank in range(2)]
    for absent in (None, "one", "other", None, "one"):
        grads: list[dict[str, Tensor | None]] = [
            {
                one.name: None if (rank, one.name) == (1, absent) else torch.ones(4, 10)
                for one in parts
            }
            for rank in range(2)
        ]
        drive([message.steps(own) for message, own in zip(both, grads, strict=True)])
        for message, own in zip(both, grads, strict=True):
            message.buffer.scatter(own)
            for name, mean in own.items():
                assert mean is None or bool(
                    (mean == (0.5 if name == absent else 1.0)).all()
                )
    [alone] = messages(1, 0, 2)
    for grad in (torch.ones(4, 10), torch.ones(10, 4).t()):
        assert alone.buffer.can_borrow({alone.names[0]: grad}) == grad.is_contiguous()
