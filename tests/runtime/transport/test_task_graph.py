"""The task manager alone, with tasks that only note that they ran."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from typing import Any

import pytest

from gradwire.runtime.transport.task_graph import Over, Task, TaskManager

WAIT_S = 60.0


class Stage:
    """A manager of two lanes, and a note of what it ran and what went wrong."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.observed: list[tuple[str, float, float]] = []
        self.errors: list[tuple[str, str]] = []
        self.failed = threading.Event()
        ticks = count()
        self.manager = TaskManager(
            ["compute", "network"],
            observe=lambda task, start, end: self.observed.append(
                (task.name, start, end)
            ),
            on_error=self._on_error,
            clock=lambda: float(next(ticks)),
        )

    def _on_error(self, task: Task, error: BaseException) -> None:
        self.errors.append((task.name, str(error)))
        self.failed.set()

    def task(
        self, name: str, lane: str | None = "compute", order: int = 0, fn: Any = None
    ) -> Task:
        def work() -> Any:
            self.ran.append(name)
            return fn() if fn is not None else None

        return Task(name, work, lane, order=(order,))

    def wait_for(self, *tasks: Task) -> None:
        """Blocks until all tasks are done."""
        over = threading.Event()
        self.manager.add(Task("over", over.set), tasks)
        assert over.wait(WAIT_S), f"still waiting; ran {self.ran}"

    def hold(self, lane: str) -> Callable[[], None]:
        """Keeps a lane busy until the returned function is called."""
        go, busy = threading.Event(), threading.Event()

        def work() -> None:
            busy.set()
            go.wait(WAIT_S)

        self.manager.add(Task("hold", work, lane))
        assert busy.wait(WAIT_S)
        return go.set


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.manager.stop()
    made.manager.join(WAIT_S)


def test_tasks_run_after_all_that_they_depend_on_and_lanes_beside_each_other(
    stage: Stage,
) -> None:
    release = stage.hold("network")
    first, second = stage.task("first", fn=lambda: 42), stage.task("second", "network")
    both = stage.task("both")
    stage.manager.add(both, [first, second])
    stage.manager.add(first)
    stage.manager.add(second)
    stage.wait_for(first)
    assert (stage.ran, first.result, second.done) == (["first"], 42, False)
    release()
    stage.wait_for(both)
    assert stage.ran == ["first", "second", "both"]


def test_an_idle_lane_keeps_nothing_of_its_last_task(stage: Stage) -> None:
    """Not what the task refers to, as a gradient, nor what those do that it freed."""
    seen = []
    for lane in ("compute", "network"):
        first = stage.task("first", lane, fn=(held := threading.Event()).is_set)
        last = stage.manager.add(stage.task("last", fn=held.is_set), [first])
        stage.wait_for(stage.manager.add(first), last)
        seen.append(weakref.ref(held))
        del first, last, held
    end_s = time.monotonic() + WAIT_S
    while any(one() for one in seen) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert [one() for one in seen] == [None, None]


def test_ready_tasks_of_a_lane_run_in_their_order_and_then_as_they_came(
    stage: Stage,
) -> None:
    release = stage.hold("compute")
    tasks = [
        stage.manager.add(stage.task(name, order=order))
        for name, order in [("c", 3), ("a", 1), ("b1", 2), ("b2", 2), ("d", 4)]
    ]
    release()
    stage.wait_for(*tasks)
    assert stage.ran == ["a", "b1", "b2", "c", "d"]


def test_a_task_without_a_lane_runs_in_the_thread_that_promoted_it(
    stage: Stage,
) -> None:
    threads: list[str] = []

    def note() -> None:
        threads.append(threading.current_thread().name)

    release = stage.hold("network")
    work = stage.manager.add(stage.task("work", "network"))
    after = stage.manager.add(stage.task("after", None, fn=note), [work])
    stage.manager.add(stage.task("alone", None, fn=note))
    release()
    stage.wait_for(after)
    assert threads == [threading.current_thread().name, "gradwire network"]


@pytest.mark.parametrize("lane", ["compute", None])
def test_the_first_error_stops_everything(stage: Stage, lane: str | None) -> None:
    def fail() -> None:
        raise ValueError("broken")

    release = stage.hold("network")
    stage.manager.add(stage.task("queued", "network"))
    bad = stage.task("bad", lane, fn=fail)
    after = stage.task("after")
    stage.manager.add(after, [bad])
    stage.manager.add(bad)
    assert stage.failed.wait(WAIT_S)
    stage.manager.add(stage.task("late"))
    release()
    stage.manager.join(WAIT_S)
    assert stage.errors == [("bad", "broken")]
    assert stage.ran == ["bad"]
    assert not bad.done
    assert not after.done


def test_stop_ends_the_threads() -> None:
    before = {*threading.enumerate()}
    stage = Stage()
    stage.manager.add(work := stage.task("work"))
    stage.wait_for(work)
    own = {*threading.enumerate()} - before
    assert own
    stage.manager.stop()
    stage.manager.join(WAIT_S)
    assert not own & {*threading.enumerate()}


class Elsewhere:
    """Work of others, which is over when the test says so."""

    def __init__(self) -> None:
        self.overs: list[Over] = []

    def task(self, name: str, lane: str = "network") -> Task:
        return Task(name, lambda: None, lane, begin=self.overs.append)


def test_work_that_was_begun_wakes_no_lane_up(stage: Stage) -> None:
    elsewhere = Elsewhere()
    begun = elsewhere.task("begun")
    stage.manager.add(begun)
    after = stage.manager.add(stage.task("after", None), [begun])
    assert (stage.ran, begun.done) == ([], False)
    elsewhere.overs[0](None)
    assert (stage.ran, begun.done, after.done) == (["after"], True, True)
    assert stage.observed == [("begun", 0.0, 1.0)]


def over_at_once(over: Over) -> None:
    over(None)


def test_a_long_chain_of_work_that_ends_as_it_begins_needs_no_stack(
    stage: Stage,
) -> None:
    tasks = [
        Task(str(i), lambda: None, "network", begin=over_at_once) for i in range(2000)
    ]
    for before, task in reversed(list(pairwise(tasks))):
        stage.manager.add(task, [before])
    stage.manager.add(tasks[0])
    assert all(task.done for task in tasks)
    assert len(stage.observed) == len(tasks)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_of_what_was_begun_stops_everything(
    stage: Stage, is_late: bool
) -> None:
    def fail(over: Over) -> None:
        raise ValueError("broken")

    elsewhere = Elsewhere()
    bad = Task("bad", lambda: None, "network", begin=fail)
    bad = elsewhere.task("bad") if is_late else bad
    later = stage.task("later", None)
    later.num_blockers = 1  # that of the failing task
    bad.dependents.append(later)
    stage.manager.add(bad)
    for over in elsewhere.overs:
        over(ValueError("broken"))
    stage.manager.add(elsewhere.task("none begins after it"))
    assert stage.errors == [("bad", "broken")]
    assert (bad.done, later.done, len(elsewhere.overs)) == (False, False, int(is_late))


def test_join_waits_for_what_was_begun(stage: Stage) -> None:
    elsewhere, joined = Elsewhere(), threading.Event()
    stage.manager.add(elsewhere.task("begun"))
    stage.manager.stop()
    joining = threading.Thread(
        target=lambda: (stage.manager.join(WAIT_S), joined.set())
    )
    joining.start()
    assert not joined.is_set()
    elsewhere.overs[0](None)
    assert joined.wait(WAIT_S)
    joining.join(WAIT_S)


def test_a_light_task_takes_the_place_of_an_idle_lane(stage: Stage) -> None:
    def light(name: str) -> Task:
        task = stage.task(
            name, "network", fn=lambda: threads.append(threading.current_thread())
        )
        task.is_light = True
        return task

    threads: list[threading.Thread] = []
    assert stage.manager.add(light("idle")).done
    assert stage.observed == [("idle", 0.0, 1.0)]
    release = stage.hold("network")
    busy = stage.manager.add(light("busy"))
    assert not busy.done
    release()
    stage.wait_for(busy)
    assert [one.name for one in threads] == [
        threading.current_thread().name,
        "gradwire network",
    ]


def test_a_lane_waits_for_whoever_took_its_place(stage: Stage) -> None:
    queued = stage.task("queued", "network")

    def work() -> None:
        stage.manager.add(queued)
        assert not queued.done

    light = stage.task("light", "network", fn=work)
    light.is_light = True
    stage.manager.add(light)
    stage.wait_for(queued)
    assert stage.ran == ["light", "queued"]
    assert stage.errors == []


def test_a_light_task_goes_behind_what_others_wait_for(stage: Stage) -> None:
    end, scatter, turn = (
        stage.task("end", None),
        stage.task("scatter", "network"),
        stage.task("turn", None),
    )
    scatter.is_light = True
    stage.manager.add(scatter, [end])
    stage.manager.add(turn, [end])
    stage.manager.add(end)
    assert stage.ran == ["end", "turn", "scatter"]


def test_nothing_follows_from_what_was_abandoned(stage: Stage) -> None:
    elsewhere = Elsewhere()
    begun = elsewhere.task("begun")
    go = threading.Event()
    held = stage.task("held", "network", fn=lambda: go.wait(WAIT_S))
    for task in (begun, held):
        stage.manager.add(stage.task(f"after {task.name}", None), [task])
        stage.manager.add(task)
    while not stage.ran:
        time.sleep(0.01)
    stage.manager.stop()
    assert not stage.manager.join(0.01)
    stage.manager.abandon()
    elsewhere.overs[0](None)
    assert not stage.manager.join(WAIT_S), (
        "the lane is still at it, and nobody waits for it"
    )
    go.set()
    while not stage.manager.join(WAIT_S):
        time.sleep(0.01)
    assert stage.ran == ["held"]
