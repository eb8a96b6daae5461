"""CaSync's task manager: lanes with queues, and the dependency graph that feeds them.

Source: HiPress section 3.1, figure 2: Q_comp and Q_commu run asynchronously; when a
task completes, the manager clears it from those that wait for it and promotes every
task that waits for nothing more. Differences: the communication queue is several lanes,
one for each process group, so that a message that waits for a peer does not hold up the
others; the graph grows as the messages' steps go on; a task may be begun in the thread
that freed it and end in another, so that no thread is woken up only to wait for it.
HiPress also joins encodes that wait in one queue. Here a plan, or `default_fusion`,
puts such gradients into one message, with one call of the codec. Joining the encodes of
several messages would save a tenth as much at most, as few encodes wait at a time.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

Clock = Callable[[], float]
Over = Callable[[BaseException | None], None]
"""A callback for the end of some work: with its error, or None."""
Begin = Callable[[Over], None]
"""Starts work that another thread does, and has the ``Over`` called at its end."""


def wall_clock() -> float:
    """Seconds on a clock that one machine's processes share, never jumping back."""
    return time.perf_counter() + _ORIGIN


_ORIGIN = time.time() - time.perf_counter()


@dataclass(eq=False, slots=True)
class Task:
    """One piece of work: ``fn`` runs on ``lane`` once all tasks it waits for are done.

    Without ``fn`` it is only a place in the graph. Of the ready tasks of a lane, the
    one with the smallest ``order`` runs first. A thread promotes a task if it ends the
    last task that this one waited for. A task without a lane runs at once, in the
    thread that promoted it, so it must be short. A task with ``begin`` starts work that
    another thread does. It is done once the callback that ``begin`` gets is called. A
    task that ``is_light`` runs in the thread that promoted it, if its lane has nothing
    else to do: waking the lane's thread would take longer.
    """

    name: str
    fn: Callable[[], Any] | None
    lane: str | None = None
    order: tuple[int, ...] = ()
    step: int = -1
    message: int = -1
    size_bytes: int = 0
    num_blockers: int = 0
    dependents: list[Task] = field(default_factory=list)
    done: bool = False
    result: Any = None
    begin: Begin | None = None
    is_light: bool = False


Observer = Callable[[Task, float, float], None]


class TaskManager:
    """Runs tasks on lanes, a thread for each, in the dependency graph's order.

    ``observe(task, start_s, end_s)`` is called after each task of a lane, and
    ``on_error(task, error)`` once, at the first task that raises. After that no further
    task is started. A lane in ``spare`` gets its thread when its first task comes.
    ``prepare`` is called once in each lane's thread.
    """

    def __init__(
        self,
        lanes: Sequence[str],
        *,
        spare: Sequence[str] = (),
        observe: Observer,
        on_error: Callable[[Task, BaseException], None],
        prepare: Callable[[], object] = lambda: None,
        clock: Clock = wall_clock,
    ) -> None:
        self._prepare = prepare
        self._observe = observe
        self._on_error = on_error
        self._clock = clock
        self._lock = threading.Lock()
        every = (*lanes, *spare)
        self._ready: dict[str, list[tuple[tuple[int, ...], int, Task]]] = {
            k: [] for k in every
        }
        self._wake: dict[str, SimpleQueue[None]] = {k: SimpleQueue() for k in every}
        """A lane's thread looks for a task once for each entry."""
        self._spare = set(spare)
        self._busy: set[str] = set()
        self._count = 0
        self._num_begun = 0
        self._none_begun = threading.Condition(self._lock)
        self._stopped = False
        self._is_abandoned = False
        self._threads: list[threading.Thread] = []
        for lane in lanes:
            self._start(lane)

    def add(self, task: Task, after: Iterable[Task] = ()) -> Task:
        """Puts a task into the graph; it starts when all of ``after`` are done."""
        with self._lock:
            for other in after:
                if not other.done:
                    other.dependents.append(task)
                    task.num_blockers += 1
            free = task.num_blockers == 0
            if free and task.fn is None and not task.dependents:
                task.done = not self._is_abandoned
                free = False
        if free:
            self._promote(task)
        return task

    def stop(self) -> bool:
        """Starts no further task and lets the threads end.

        Returns whether it was running.
        """
        with self._lock:
            was_running = not self._stopped
            self._stopped = True
        for wake in self._wake.values():
            wake.put(None)
        return was_running

    def is_busy(self, lane: str) -> bool:
        """Whether a lane has a task in hand."""
        return lane in self._busy

    def is_own_thread(self) -> bool:
        """Whether the caller runs on a lane, where waits for tasks never end."""
        return threading.current_thread() in self._threads

    def join(self, timeout_s: float) -> bool:
        """Waits for the tasks that a stopped manager has begun, unless abandoned.

        Returns whether all of them are over.
        """
        end_s = time.monotonic() + (0.0 if self._is_abandoned else timeout_s)
        others = [one for one in self._threads if one is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, end_s - time.monotonic()))
        with self._lock:
            is_over = self._none_begun.wait_for(
                lambda: not self._num_begun, max(0.0, end_s - time.monotonic())
            )
        return is_over and not any(thread.is_alive() for thread in others)

    def abandon(self) -> None:
        """Has tasks that are still under way free no other task once they end."""
        with self._lock:
            self._is_abandoned = True

    def _start(self, lane: str) -> None:
        name = f"gradwire {lane}"
        thread = threading.Thread(
            target=self._serve, args=(lane,), name=name, daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _promote(self, task: Task) -> None:
        """Queues a task, or runs one without a lane and promotes what that frees.

        It loops instead of recursing, as a chain of tasks may be as long as there are
        messages.
        """
        free = deque([task])
        while free:
            task = free.popleft()
            if task.begin is not None:
                free.extend(self._begin(task, task.begin))
            elif task.is_light and any(not one.is_light for one in free):
                free.append(task)  # behind what others wait for
            elif task.lane is not None and task.is_light and self._took(task.lane):
                free.extend(self._do(task, task.lane))
            elif task.lane is not None:
                self._queue(task, task.lane)
            elif self._run(task):
                free.extend(self._complete(task))

    def _begin(self, task: Task, begin: Begin) -> list[Task]:
        """Begins a task.

        Returns the tasks that it freed, if it ended before this returns.
        """
        with self._lock:
            if self._stopped:
                return []
            self._num_begun += 1
        freed = []
        beginning = threading.get_ident()
        start_s = self._clock()

        def over(error: BaseException | None) -> None:
            try:
                if error is not None:
                    self._fail(task, error)
                    return
                self._observe(task, start_s, self._clock())
                for one in self._complete(task):
                    if threading.get_ident() == beginning:
                        freed.append(one)
                    else:
                        self._promote(one)
            finally:
                with self._lock:
                    self._num_begun -= 1
                    if not self._num_begun:
                        self._none_begun.notify_all()

        task.begin = None  # a task that is kept must not keep the buffers of its work
        try:
            begin(over)
        except BaseException as error:
            over(error)
            pass_on(error)
        # A later call of ``over`` in this thread promotes tasks by itself.
        beginning = 0
        return freed

    def _queue(self, task: Task, lane: str) -> None:
        with self._lock:
            if lane in self._spare:
                self._spare.discard(lane)
                self._start(lane)
            self._count += 1
            heapq.heappush(self._ready[lane], (task.order, self._count, task))
            is_idle = lane not in self._busy
        if is_idle:  # a thread that works for a lane looks for its next task itself
            self._wake[lane].put(None)

    def _serve(self, lane: str) -> None:
        queue = self._ready[lane]
        wake = self._wake[lane]
        self._prepare()
        while True:
            wake.get()
            with self._lock:
                if self._stopped:
                    return
                if not queue or lane in self._busy:
                    continue
                task = heapq.heappop(queue)[2]
                self._busy.add(lane)
            for freed in self._do(task, lane):
                self._promote(freed)
                del freed
            del task  # an idle lane keeps nothing that its last tasks refer to

    def _took(self, lane: str) -> bool:
        """Takes an idle lane for the caller's thread; returns whether it was idle."""
        with self._lock:
            if self._stopped or self._ready[lane] or lane in self._busy:
                return False
            self._busy.add(lane)
            return True

    def _do(self, task: Task, lane: str) -> list[Task]:
        """Runs a task on a lane that the caller has taken, and gives the lane back.

        Returns the tasks that this task freed.
        """
        start_s = self._clock()
        is_done = self._run(task)
        if is_done:
            self._observe(task, start_s, self._clock())
        with self._lock:
            self._busy.discard(lane)
            has_more = bool(self._ready[lane])
        if has_more:
            self._wake[lane].put(None)
        return self._complete(task) if is_done else []

    def _run(self, task: Task) -> bool:
        """Runs a task's work; returns whether it was done.

        An error in it stops everything.
        """
        try:
            if task.fn is not None:
                task.result = task.fn()
        except BaseException as error:
            self._fail(task, error)
            pass_on(error)
            return False
        return True

    def _fail(self, task: Task, error: BaseException) -> None:
        if self.stop() or is_interrupt(error):  # else another task has failed before
            self._on_error(task, error)

    def _complete(self, task: Task) -> list[Task]:
        """Marks a task done; returns the tasks that waited for nothing else."""
        free = []
        with self._lock:
            if self._is_abandoned:
                return []
            task.done = True
            for other in task.dependents:
                other.num_blockers -= 1
                if other.num_blockers == 0:
                    free.append(other)
            task.dependents = []
        return free


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is one that ends the process, as ``KeyboardInterrupt`` and
    ``SystemExit`` do. It is reported even after another error."""
    return not isinstance(error, Exception)


def pass_on(error: BaseException) -> None:
    """Raises an interrupt in the main thread, which runs the user's program."""
    if is_interrupt(error) and threading.current_thread() is threading.main_thread():
        raise error


def is_foreign() -> bool:
    """Whether this thread was not started by Python, as those of channels are not."""
    return isinstance(threading.current_thread(), threading._DummyThread)


class Once:
    """A callback that can be called from several places but runs once."""

    def __init__(self, callback: Callable[[BaseException | None], None]) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self.called = False

    def __call__(self, failure: BaseException | None) -> None:
        with self._lock:
            if self.called:
                return
            self.called = True
        # A kept object must not keep the objects that its callback refers to.
        callback = self._callback
        self._callback = lambda failure: None
        callback(failure)
