"""Ctrl-C and ``sys.exit`` end a rank by themselves, wherever they come; no other error
hides them.

A supervisor restarts a job by its exit code, and must not restart one that was
interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.contract.verbs import Compute, Steps
from gradwire.errors import RankFailed
from gradwire.runtime.engine import engine
from gradwire.runtime.engine.engine import Engine, Launch
from gradwire.runtime.liveness import membership
from gradwire.runtime.liveness.membership import ALONE
from gradwire.runtime.step import synchroniser
from gradwire.runtime.step.buffer import GradientBuffer
from gradwire.runtime.step.messages import Message
from gradwire.runtime.survive import shrink
from gradwire.runtime.transport import checksums, wire
from gradwire.runtime.transport.task_graph import Task, TaskManager
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import SMALL_MB, Net, loss_of

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]
LIMIT = timedelta(seconds=60)
INTERRUPTS = (KeyboardInterrupt, SystemExit)
PLACES: dict[str, tuple[Any, str]] = {
    "a verb is started": (wire, "start"),
    "verbs are carried out on a lane": (engine, "carry_out"),
    "what arrived is checked": (checksums.Seals, "check"),
    "gradients are gathered": (Message, "steps"),
    "means are scattered": (GradientBuffer, "scatter"),
    "a gradient is handed in": (synchroniser.Synchroniser, "ready"),
    "the step is waited for": (synchroniser.Synchroniser, "finish"),
    "a step is opened": (engine.Engine, "begin_step"),
}
"""The function that an interrupt comes in, by what it does."""
AT_THE_END = ("the step is waited for", "means are scattered")
"""The places behind the last message, by when the other rank may have its means."""


def raising(error: BaseException) -> Callable[..., Any]:
    def work(*_: Any, **__: Any) -> Any:
        raise error

    return work


def interrupted(
    rank: int, world: int, place: str, kind: type[BaseException], way: str
) -> str:
    """The type of the error that ends a step of rank 0 in which an interrupt comes."""
    net: Any = Net()
    if way == "ddp":
        net = DistributedDataParallel(net)
    given = keywords(
        bucket_cap_mb=SMALL_MB, timeout=LIMIT, checksums=way == "checksums"
    )
    exchange = (
        gw.pair(gw.compress.none(), gw.collective.ring()) if way == "ring" else "topk"
    )
    handle = gw.attach(net, exchange, **given)
    loss_of(net, rank, 0).backward()
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(patch.object(*PLACES[place], raising(kind("by hand"))))
        try:
            loss_of(net, rank, 1).backward()
        except BaseException as error:
            found = type(error).__name__
        else:
            found = "nothing"
    handle.detach()
    return found


CASES = [
    *(("a verb is started", kind, "module") for kind in INTERRUPTS),
    ("gradients are gathered", KeyboardInterrupt, "module"),
    ("what arrived is checked", KeyboardInterrupt, "checksums"),
    ("the step is waited for", SystemExit, "module"),
    ("a gradient is handed in", KeyboardInterrupt, "module"),
    ("a step is opened", KeyboardInterrupt, "module"),
    ("means are scattered", SystemExit, "module"),
    ("verbs are carried out on a lane", SystemExit, "ring"),
    ("a verb is started", KeyboardInterrupt, "ddp"),
    ("gradients are gathered", KeyboardInterrupt, "ddp"),
]


def all_interrupted(rank: int, world: int) -> list[str]:
    return [interrupted(rank, world, *case) for case in CASES]


@pytest.mark.slow
def test_an_interrupt_ends_a_step_by_itself_wherever_it_comes(
    ranks_of: Callable[[int], Ranks], subtests: pytest.Subtests
) -> None:
    """Threads that hear of it leave it to the main one; others are told which rank it
    was.
    """
    ranks = ranks_of(2)
    ranks.send(all_interrupted)
    first, second = (one.value for one in ranks.collect(200.0))
    for (place, kind, way), own, other in zip(CASES, first, second, strict=True):
        with subtests.test(f"{place}, {way}"):
            assert own == kind.__name__
            assert other == "RankFailed" or (other == "nothing" and place in AT_THE_END)


def manager(failures: list[BaseException]) -> TaskManager:
    return TaskManager(
        [], observe=lambda *_: None, on_error=lambda task, error: failures.append(error)
    )


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_a_task_passes_an_interrupt_of_the_main_thread_on(
    kind: type[BaseException],
) -> None:
    for task in (
        Task("work", raising(kind())),
        Task("begun", lambda: None, begin=raising(kind())),
    ):
        failures: list[BaseException] = []
        tasks = manager(failures)
        with pytest.raises(kind):
            tasks.add(task)
        assert [type(one) for one in failures] == [kind]


def test_an_interrupt_in_a_task_that_runs_on_is_told_after_a_failure() -> None:
    failures: list[BaseException] = []
    tasks = manager(failures)

    def work() -> None:
        tasks.stop()  # as another task has failed meanwhile
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tasks.add(Task("work", work))
    assert [type(one) for one in failures] == [KeyboardInterrupt]


def test_an_error_of_a_task_is_no_interrupt() -> None:
    failures: list[BaseException] = []
    tasks = manager(failures)
    tasks.add(Task("work", raising(ValueError())))
    tasks.add(Task("work", raising(ValueError())))
    assert len(failures) == 1


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_an_interrupt_takes_the_place_of_an_earlier_failure(
    kind: type[BaseException],
) -> None:
    one = Engine(ALONE, num_channels=1, timeout=LIMIT, on_span=lambda span: None)
    one._fail(RankFailed("rank 1 is lost", ranks=(1,)))
    one._task_failed(Task("scatter", lambda: None, "compute"), kind())
    with pytest.raises(kind):
        one.check()
    one._fail(RankFailed("rank 1 is lost", ranks=(1,)))
    with pytest.raises(kind):
        one.check()
    one.close()


def test_a_computation_in_this_thread_passes_an_interrupt_on() -> None:
    one = Engine(ALONE, num_channels=1, timeout=LIMIT, on_span=lambda span: None)

    def steps() -> Steps[None]:
        yield Compute("encode", raising(KeyboardInterrupt()), 1)

    with pytest.raises(KeyboardInterrupt):
        one.launch(0, "message", steps(), Launch(is_inline=True))
    one.close()


def test_a_verb_that_has_ended_already_passes_an_interrupt_on() -> None:
    """torch drops what a callback raises, so it calls none back for such a verb."""
    failures: list[BaseException | None] = []

    class Ended:
        def get_future(self) -> Ended:
            return self

        def done(self) -> bool:
            return True

        def add_done_callback(self, callback: Any) -> None:
            raise AssertionError("torch would drop an interrupt here")

        def value(self) -> None:
            raise KeyboardInterrupt

    with patch.object(wire, "start", lambda verb, channel, **how: Ended()):
        wire.begin(object(), None, failures.append)  # type: ignore[arg-type]
    assert [type(one) for one in failures] == [KeyboardInterrupt]


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_survivors_that_are_interrupted_while_they_meet_end_by_it(
    kind: type[BaseException],
) -> None:
    one: Any = object.__new__(shrink.Shrinking)
    one._progress = _Nothing()
    one._run, one._connect = SimpleNamespace(group=None), None
    one._progress.next_epoch = raising(kind())
    with pytest.raises(kind):
        one._lose(RankFailed("rank 1 is lost", ranks=(1,)))


class _Nothing:
    """Anything of which nothing matters."""

    step = 0
    is_whole = False
    open = False

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *given: Any) -> Any:
        return self


def test_an_interrupt_in_an_agreement_passes() -> None:
    who = membership.Membership("rejoin interrupted", 0, 2)
    with (
        patch.object(membership, "own_store", raising(KeyboardInterrupt())),
        pytest.raises(KeyboardInterrupt),
    ):
        who.agree("", len, LIMIT)
