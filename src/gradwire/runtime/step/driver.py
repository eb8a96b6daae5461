"""Driver: one message's text on its way through the engine's task graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...contract.verbs import Among, Communication, Compute, Steps
from ..device.staging import Staged
from ..device.streams import SideStream
from .lanes import Over, Task, TaskManager, wall_clock
from .last_verbs import NotedVerb
from .wire import Routes, as_on_a_lane, begin, carry_directly, carry_out, is_begun

if TYPE_CHECKING:
    from ..failure.checksums import Seals

COMPUTE = "compute"
"""The lane of every task that is no communication."""
INLINE = "backward"
"""The lane, in traces, of computations in the thread of the backward pass."""
OFFLOAD = "offload"
"""The lane of what the host encodes for a device; it has a thread where a plan has such tensors."""
COMPUTING = (COMPUTE, INLINE, OFFLOAD)
AMONG_SHARDS = f" among {Among.SHARDS.value}"
"""The end of the name of a communication among shards."""


class Driver:
    """Puts the verbs of one text into the graph as tasks, and resumes it with their results.

    ``lane`` is the number of its communication lane. ``turn`` holds the tasks that must be done
    before the message may use its channel. ``side`` is the stream on which it is computed, where a
    device does so.
    """

    def __init__(
        self,
        manager: TaskManager,
        routes: Routes,
        text: Steps[Any],
        index: int,
        lane: int,
        step: int,
        end: Task,
        turn: Sequence[Task],
        side: SideStream | None = None,
    ) -> None:
        self._manager, self._routes, self._side = manager, routes, side
        self.text, self.index, self.lane = text, index, lane
        self.step, self.end, self.turn = step, end, turn
        self._noted: NotedVerb | None = None

    def resume(self, value: Any) -> None:
        """Sends the text its last verbs' results and puts its next verbs into the graph."""
        if self._noted is not None:
            self._noted.done_s, self._noted = wall_clock(), None
        try:
            with as_on_a_lane(self._side):  # this may be the thread of the backward pass
                asked = self.text.send(value)
        except StopIteration as stop:
            value = stop.value
            self.end.fn = lambda: value
            self.end.num_blockers = 0
            self._manager.add(self.end, self._take_turn())
            return
        verbs = asked if isinstance(asked, tuple) else (asked,)
        computes = {
            i: self.task(v.name, v.fn, COMPUTE, 0)
            for i, v in enumerate(verbs)
            if isinstance(v, Compute)
        }
        network = [verb for verb in verbs if not isinstance(verb, Compute)]
        # Verbs for the network that may run at once are one task, started together.
        wire = [self._communication(network)] if network else []

        def results() -> Any:
            found = [computes[i].result if i in computes else None for i in range(len(verbs))]
            return tuple(found) if isinstance(asked, tuple) else found[0]

        self._then(results, [*computes.values()], wire)

    def _take_turn(self) -> Sequence[Task]:
        """The tasks that the first use of the channel waits for; empty from the second use on."""
        turn, self.turn = self.turn, ()
        return turn

    def _then(self, value: Callable[[], Any], computes: list[Task], wire: list[Task]) -> None:
        resume = Task("resume", lambda: self.resume(value()), step=self.step, message=self.index)
        # The resuming task must wait before any of the others can be done.
        resume.num_blockers = len(computes) + len(wire)
        for task in (*computes, *wire):
            task.dependents.append(resume)
        if not resume.num_blockers:
            self._manager.add(resume)
        for task in computes:
            self._manager.add(task)
        for task in wire:
            self._manager.add(task, self._take_turn())

    def _communication(self, verbs: Sequence[Communication]) -> Task:
        routes, index, lane = self._routes, self.index, self.lane
        routes.of(verbs, index, lane)  # raises where there are none
        direct, others = ([], verbs) if self._side is None else routes.parted(verbs, lane)
        seals = routes.seals(others, self.step)
        beside = [one for one in seals.beside if one is not None] if seals else []
        size_bytes = sum(routes.sent_bytes(verb) for verb in (*verbs, *beside))
        name = "+".join(_name(verb) for verb in verbs)
        noted = self._noted = routes.last_verbs.launch(self.step, index, name, size_bytes)
        if (carry_from_device := self._from_device(direct, others, noted, seals)) is not None:
            return self.task(name, carry_from_device, routes.lanes[lane], size_bytes)

        # A task that is never done must not keep a channel open: it is looked up late.
        def carry() -> None:
            noted.started_s = wall_clock()
            carry_out(verbs, routes.of(verbs, index, lane), seals)

        def start(over: Over) -> None:
            noted.started_s = wall_clock()
            begin(verbs[0], routes.of(verbs, index, lane)[0], over, seals)

        task = self.task(name, carry, routes.lanes[lane], size_bytes)
        task.begin = start if is_begun(verbs) else None
        return task

    def _from_device(
        self,
        direct: Sequence[Communication],
        others: Sequence[Communication],
        noted: NotedVerb,
        seals: Seals | None,
    ) -> Callable[[], None] | None:
        """Makes the work of verbs on a device's memory; None where all lies on the host.

        Its own channel carries out the ``direct`` ones.
        """
        routes, index, lane, side = self._routes, self.index, self.lane, self._side
        if side is None:
            return None
        staged, ready = self._staged(others), side.mark() if direct else None
        if ready is None and staged is None:
            return None

        def carry() -> None:
            noted.started_s = wall_clock()
            if ready is not None:
                with side.wired(ready):
                    channels = [routes.circles[verb.among].direct for verb in direct]
                    carry_directly(direct, channels, side.device)
            if staged is not None:
                staged.wait()
                carry_out(staged.verbs, routes.of(others, index, lane), seals)
                staged.back()
            elif others:
                carry_out(others, routes.of(others, index, lane), seals)

        return carry

    def _staged(self, verbs: Sequence[Communication]) -> Staged | None:
        """The verbs in host memory, where what they send or receive lies on a device."""
        if self._side is None:
            return None
        ranks = [self._routes.circles[verb.among].rank for verb in verbs]
        side = self._side
        return side.staging.out(self.index, verbs, ranks, side.kind, side.stream)

    def task(self, name: str, fn: Callable[[], Any], lane: str, size_bytes: int) -> Task:
        """A task of this message; tasks that are ready on a lane run in issue order."""
        if self._side is not None and lane == COMPUTE:
            fn = self._side.on(fn)
        return Task(
            name,
            fn,
            lane,
            order=(self.step, self.index),
            step=self.step,
            message=self.index,
            size_bytes=size_bytes,
        )


def _name(verb: Communication) -> str:
    among = "" if verb.among is Among.RANKS else f" among {verb.among.value}"
    return f"{type(verb).__name__}{among}"
