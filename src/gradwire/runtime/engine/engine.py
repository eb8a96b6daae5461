"""Engine: drives messages' steps on lanes, and turns a peer's death into an error.

A lane is a queue of tasks with one thread. There is a lane for computations, and one
for each channel (a process group). The steps of a message are one generator of verbs.
Verbs become tasks of a dependency graph. A further task, without a lane, waits for them
and resumes the steps.

Of C channels message i travels on channel i mod C. Its first verb for the network waits
until the message before it on this channel has ended. So each process group sees one
message at a time, whole and in issue order, which is the same on every rank. No two
ranks meet in different collectives. Gather and encode do not wait for the channel, and
scatter does not hold it: while one message uses the network, others use the compute
lane.

If ranks hold shards of layers, each channel has a second process group, for verbs among
shards. If hosts have several ranks, each channel has a group for the ranks of one host,
and a group for ranks across hosts. These groups add no deadlock: shards issue the same
messages, and all ranks have one order of (message, verb). A rank only waits for ranks
that are further back in this order, so the rank furthest back never waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...collective.steps.travel import members
from ...contract.trace.span import Span
from ...contract.verbs import (
    AllGather,
    AllToAll,
    Among,
    Communication,
    Compute,
    Recv,
    Send,
    Steps,
    Verb,
)
from ...errors import ExitCode, InvalidSetting, RankFailed
from ...exchange.sends import THREADS, SchedulerOf, SendScheduler, as_sends
from ..device.streams import SideStream
from ..liveness.alarm import Alarm, said
from ..liveness.blame import (
    IN_ATTACH,
    blamed,
    failure_of,
    first_line,
    loopback_name,
    silence,
)
from ..liveness.epochs import next_epoch
from ..liveness.forks import watch
from ..liveness.membership import ALONE, EXTRA_S, Membership
from ..liveness.pulse import PATIENCE_S, Place, Pulse, Sign
from ..liveness.sweeping import give_memory_back, leave_soon
from ..transport.task_graph import (
    Once,
    Over,
    Task,
    TaskManager,
    is_foreign,
    is_interrupt,
    wall_clock,
)
from ..transport.wire import (
    AMONG_SHARDS,
    Channel,
    NotedVerb,
    RankGroup,
    Routes,
    agree_to_lend,
    as_on_a_lane,
    begin,
    broadcast_all,
    carry_directly,
    carry_out,
    in_background,
    is_begun,
    open_channels,
)

COMPUTE = "compute"
"""The lane of every task that is no communication."""
INLINE = "backward"
"""The lane, in traces, of computations in the thread of the backward pass."""
OFFLOAD = "offload"
"""The lane where the host encodes for a device.

It has a thread only if a plan has such tensors.
"""
COMPUTING = (COMPUTE, INLINE, OFFLOAD)
"""The lanes of all computations."""
_JOIN_S = 10.0
"""Seconds that ``close`` waits for tasks. An encode ends by then; waits may not."""
_ENDLESS = timedelta(days=3650)
_LOOK_S = 0.5
"""Seconds between two looks for silent ranks."""


_NOTHING = Task("nothing", None, done=True)
"""A task that is done, where there is no message before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A message's way through the graph: what it waits for, what follows, and where.

    >>> Launch(is_control=True).behind
    ()
    """

    behind: Sequence[Task] = ()
    """The tasks that must be done before the steps begin. Meanwhile the message already
    has its place in the issue order.
    """
    after: Sequence[Task] = ()
    """The tasks that must be done before its first verb for the network begins."""
    last: Callable[[], Any] | None = None
    """Work for the compute lane once the steps have ended and the channel is free: it
    scatters the mean.
    """
    last_behind: Sequence[Task] = ()
    """The tasks that must be done before ``last``."""
    last_is_light: bool = False
    """Whether ``last`` is so short that waking a lane's thread would take longer."""
    is_control: bool = False
    """Whether the message takes the control channel, which carries no gradients."""
    is_of_step: bool = True
    """Whether the launch counts as progress in a step, which other ranks can see."""
    is_inline: bool = False
    """Whether the launching thread does all computations up to the first verb for the
    network. Their error is raised.
    """
    side: SideStream | None = None
    """The device's stream that computes the message; None if the host computes it."""


PLAIN = Launch()
"""A message of gradients that waits for no task, in a host's memory."""
CONTROL = Launch(is_control=True)
"""A message on the control channel, which carries no gradients."""
BETWEEN_STEPS = Launch(is_control=True, is_of_step=False)
"""A message on the control channel that belongs to no step."""


class Engine:
    """Runs steps for this rank of the group ``who``.

    ``shards`` is the group of ranks that hold the other parts of its layers, if layers
    are cut. Ranks are numbered host after host, with ``ranks_per_host`` on each host.
    With ``ranks_per_replica`` they are numbered replica after replica. Then a rank
    averages with the ranks that have the same place in the other replicas, and all
    ranks of all replicas notice a loss together. ``timeout`` bounds a wait for a peer.
    ``on_span`` receives a span for every task. With ``checksums`` ranks compare the
    bytes that arrive with the bytes that were sent. With ``scheduler_of`` a scheduler
    says when sends travel.

    The engine's pulse shows the others that this rank lives, and finds lost ranks. With
    ``num_channels`` 0 the engine has a pulse, and neither channels nor lanes. If
    ``connects`` is False, it has only a pulse until ``connect`` is called.
    """

    is_copy = False
    """Whether this process was forked from the one that has connected."""
    _closed: InvalidSetting | None = None
    """The error of waits after ``close``; None until then."""
    _elsewhere: BaseException | None = None
    """The failure of another model, which interrupts waits; see ``interrupt``."""
    servers = range(0)
    """The last ranks, if these hold no model and only aggregate."""
    on_failure: Callable[[BaseException], None] | None = None
    """A function that is called with the first failure."""

    def __init__(  # noqa: PLR0913
        self,
        who: Membership,
        *,
        num_channels: int,
        timeout: timedelta,
        on_span: Callable[[Span], None],
        shards: Membership = ALONE,
        ranks_per_host: int = 1,
        ranks_per_replica: int = 1,
        checksums: bool = False,
        scheduler_of: SchedulerOf | None = None,
        connects: bool = True,
    ) -> None:
        self.everyone = who
        """The ranks of all replicas, which notice a lost rank together."""
        if ranks_per_replica > 1:
            who = who.across_hosts(ranks_per_replica)
        self.who = who
        self.rank = who.rank
        self.world = who.world
        self.num_together = ranks_per_host * ranks_per_replica
        """The number of ranks that go on or leave together."""
        self.replica = self.everyone.on_host(ranks_per_replica)
        """The ranks that hold this rank's model together."""
        self.shards = shards
        self.ranks_per_host = ranks_per_host
        self.timeout = timeout
        self.num_channels = num_channels
        self.credit = num_channels
        # One channel more than asked for: a control message must not wait behind a
        # large one.
        count = num_channels + 1 if num_channels else 0
        lanes = [f"communication {i}" for i in range(count)]
        self.routes = Routes(lanes, checksums=checksums)
        self._tails = [_NOTHING] * len(lanes)
        """The end of the last message on each lane."""
        self._last_turn = _NOTHING
        """Done when the last message of gradients may use its channel."""
        self._on_span = on_span
        self._lock = threading.Lock()
        self._waiters: list[Once] = []
        self._failure: BaseException | None = None
        watch(self)
        self._step = 0
        self._local_step = 0
        self.num_calls = 0
        """The joint calls that this rank has made."""
        self.inline_s = 0.0
        """Seconds so far of tasks that ran while the backward pass waited."""
        self._manager = TaskManager(
            [COMPUTE, *lanes] if lanes else [],
            spare=[OFFLOAD] if lanes else [],
            observe=self._observe,
            on_error=self._task_failed,
            prepare=lambda: torch.set_grad_enabled(False),
        )
        self._scheduler_of = scheduler_of
        self.slots: SendScheduler | None = None
        self._pulse: Pulse | None = None
        if self.everyone.world > 1:
            self._pulse = Pulse(
                *self.everyone[:3],
                self._alarmed,
                self._lose_store,
                self._fail,
                self._waits,
            )
            self._pulse.peers = self._among_all(range(self.world))
        if connects:
            try:
                self.connect()
            except BaseException:
                self.close()
                raise

    def connect(self) -> None:
        """Connects the ranks."""
        who = self.who
        groups = self.routes.groups
        count = len(self.routes.lanes)
        per_host = self.ranks_per_host
        scheduler_of = self._scheduler_of
        self._open(Among.RANKS, who, count and count + 2 * bool(scheduler_of))
        if scheduler_of and Among.RANKS in groups:
            channels = groups[Among.RANKS].channels
            self.slots = scheduler_of(channels[count], channels[count + 1])
        self._open(Among.SHARDS, self.shards, count)
        if per_host > 1:
            self._open(Among.HOST, who.on_host(per_host), self.num_channels)
            self._open(Among.HOSTS, who.across_hosts(per_host), self.num_channels)
        host = groups.get(Among.HOST)
        # checksums cover bytes that are sent, and lent memory is not sent
        if host is not None and not self.routes.checksums:
            host.lends = self.meanwhile("connect", partial(agree_to_lend, host))

    def _open(self, among: Among, who: Membership, count: int) -> None:
        """Connects the ranks ``who`` by ``count`` channels, if there are others."""
        if who.world > 1 and count:
            what = f"connect{AMONG_SHARDS}" if among is Among.SHARDS else "connect"
            channels = self.meanwhile(
                what, lambda: open_channels(*who[:3], count, self.timeout)
            )
            ranks: Sequence[int] = ()
            if among is not Among.SHARDS:
                ranks = members(self.rank, self.world, self.ranks_per_host, among)
            self.routes.groups[among] = RankGroup(*who[:3], channels, ranks=ranks)

    def open_beside(self, name: str, timeout: timedelta = _ENDLESS) -> Channel:
        """Opens a channel to all ranks that carries no messages; all ranks call this.

        By default its receives may wait for as long as training goes on, so nothing
        but ``watch`` notices a lost rank there. Such a channel carries no collectives.
        """
        who = self.who.beside(name)
        is_endless = timeout is _ENDLESS
        opening = partial(
            open_channels, *who[:3], 1, timeout, is_measured=not is_endless
        )
        within = self.timeout if is_endless else None
        [channel] = self.meanwhile("connect", opening, within=within)
        group = RankGroup(*self.who[:3], [])
        self.routes.groups.setdefault(Among.RANKS, group).channels.append(channel)
        return channel

    def open_to_servers(self, servers: int) -> None:
        """Connects rank 0 with the last ranks, which hold no model; all ranks call it.

        A server waits for as long as a training takes between two steps.
        """
        self._to_servers = self.open_beside("servers")
        self.servers = range(self.world - servers, self.world)
        if self.rank in self.servers:
            self.watch(lambda: [0])

    def _tell_servers(self, *, is_step: bool) -> None:
        """Has rank 0 tell servers that a step begins, or that no step follows.

        A server has listened since its last step, so this does not wait for long.
        """
        word_1 = torch.full((1,), is_step, dtype=torch.uint8, device="cpu")
        for rank in () if self.rank else self.servers:
            self._to_servers.send([word_1], rank, 0).wait(self.timeout)

    def hears_of_step(self) -> bool:
        """Waits, on a server, until a step begins; False if no step follows."""
        word_1 = torch.empty(1, dtype=torch.uint8, device="cpu")
        hearing = self._to_servers.recv([word_1], 0, 0)
        self.meanwhile("hear of a step", hearing.wait, within=_ENDLESS)
        return bool(word_1)

    def meanwhile(
        self, what: str, work: Callable[[], Any], *, within: timedelta | None = None
    ) -> Any:
        """Does ``work`` that waits for other ranks outside of messages; its result.

        ``work`` runs in the background. Meanwhile this looks whether the run has
        failed, and raises then. It also raises after ``within``. None (the default)
        stands for the engine's time-out, which bounds ``work`` too, and some seconds:
        if the store answers, the error of ``work`` names the ranks that did not come.
        """
        working = in_background(work)
        limit_s = (within or self.timeout).total_seconds()
        begun_s = time.monotonic()
        while not wait([working], _LOOK_S).done:
            if (failure := self._failure or self._closed) is not None:
                raise failure
            over_s = time.monotonic() - begun_s - limit_s
            is_last = within is not None or self._is_mute
            if over_s > (0.0 if is_last else EXTRA_S):
                break
        self.check()
        try:
            return working.result(0)
        except (RuntimeError, TimeoutError) as error:
            raise self.unreachable(what, error) from error

    @property
    def _is_mute(self) -> bool:
        """Whether the store gives no answer."""
        return self._pulse is not None and self._pulse.mute_s > PATIENCE_S

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Replaces tensors by those of rank ``source``; called between two steps."""
        channel = self.routes.first_channel
        self.carry("broadcast", partial(broadcast_all, tensors, channel, src=source))

    def rows(self, own_N: Tensor) -> Tensor:
        """All ranks' tensors of one length, in rank order; between two steps."""
        rows_WN = own_N.new_empty(self.world, own_N.numel())
        gather = AllGather(rows_WN.view(-1), own_N)
        channel = self.routes.first_channel
        self.carry("all_gather", partial(carry_out, [gather], [channel]))
        return rows_WN

    def carry(
        self, name: str, work: Callable[[], object], step: int = IN_ATTACH
    ) -> None:
        """Does an operation outside of messages; its error names the lost ranks."""
        try:
            work()
        except RuntimeError as error:
            raise self.unreachable(name, error, step) from error

    def use(self, credit: int) -> None:
        """Has messages take the first ``credit`` channels from now on, as a plan says.

        All ranks call it at the same step, while no message is under way.
        """
        assert 1 <= credit <= self.num_channels, "channels are opened once, at attach"
        self.credit = credit

    def begin_step(self, step: int, *, launched: int = 0) -> None:
        """Sets the step of the next messages; ``launched`` counts those launched."""
        self._step = step
        self._show(launched)
        try:
            self._tell_servers(is_step=True)
        except RuntimeError as error:
            raise self.unreachable("tell servers", error, step) from error

    def launch(
        self, index: int, name: str, steps: Steps[Any], how: Launch = PLAIN
    ) -> Task:
        """Starts the message of issue number ``index``; returns the task that ends it.

        Its first verb for the network waits until the message before it on its channel
        has ended. Messages of gradients also wait until all messages launched before
        them may use their channels. Without ``how.last`` the returned task's result is
        the value that the steps returned.
        """
        manager = self._manager
        lane = self.num_channels
        before = [*how.after]
        slots = None
        if not how.is_control:
            slots = None if how.side else self.slots
            lane = self.routes.lane(index, self.credit)
            # Messages of gradients may use their channels in issue order only.
            before.append(self._last_turn)
        driver = Driver(
            manager,
            self.routes,
            self.do_inline,
            self.routes.sealed(self.routes.lending(steps), lane),
            name,
            index,
            lane,
            self._step,
            how.side,
            how.is_inline,
            slots,
            how.after,
            0 if slots is None else slots.launch(),
        )
        end = driver.end
        if slots is not None:
            manager.add(Task("ended", slots.end), [end])
        turn = driver.turn
        manager.add(turn, [*before, self._tails[lane]])
        if self._pulse is not None and how.is_of_step:
            self._show(self._pulse.place.launched + 1)
        whole = end
        if how.last is not None:
            whole = driver.task("scatter", how.last)
            whole.is_light = how.last_is_light
            manager.add(whole, [end, *how.last_behind])
        manager.add(driver.short_task(name, driver.resume), how.behind)
        # Set only now: a message that is encoded inline must not wait for itself.
        self._tails[lane] = end
        if not how.is_control:
            self._last_turn = turn
        if how.is_inline:
            self.check()
        return whole

    def begin(self, task: Task) -> Task:
        """Puts a task that waits for nothing on its lane."""
        return self._manager.add(task)

    def do_inline(self, task: Task) -> Task:
        """Does a task in the caller's thread, with a span as one on a lane has.

        An error in it ends the run, and is raised.
        """
        start_s = wall_clock()
        try:
            if task.fn is not None:
                task.result = task.fn()
        except BaseException as error:
            self._task_failed(task, error)
            raise
        end_s = wall_clock()
        if task.lane == INLINE:
            self.inline_s += end_s - start_s
        self._observe(task, start_s, end_s)
        task.done = True
        return task

    def wait(self, ends: list[Task]) -> None:
        """Blocks until all ``ends`` are done; a lost peer raises ``RankFailed``."""
        self.refuse_copy()  # in a forked process, locks may be held for ever
        # Held until the end. An Event would take ten times as long.
        over = threading.Lock()
        over.acquire()
        ended = []

        def end(failure: BaseException | None) -> None:
            ended.append(failure)
            over.release()

        self.when_done(ends, end)
        over.acquire()
        self.check()
        if ended[0] is not None:
            raise ended[0]

    def when_done(
        self, ends: list[Task], callback: Callable[[BaseException | None], None]
    ) -> Task:
        """Calls back once, with None when all ``ends`` are done or with the failure.

        The task that is returned is done when the callback has returned.
        """
        once = Once(callback)
        with self._lock:
            self._waiters = [waiter for waiter in self._waiters if not waiter.called]
            self._waiters.append(once)
        task = self._manager.add(Task("when done", lambda: once(None)), ends)
        if (failure := self._failure or self._elsewhere or self._closed) is not None:
            once(failure)
        return task

    def interrupt(self, error: BaseException | None) -> None:
        """Makes waits raise ``error``, the failure of another model.

        A call with None ends that. Messages go on, and can be waited for again.
        """
        with self._lock:
            self._elsewhere = error
            waiters = [] if error is None else list(self._waiters)
        for waiter in waiters:
            waiter(error)

    def become_copy(self, error: InvalidSetting) -> list[Any]:
        """Raises ``error`` from now on; called in a forked process, see `forks`."""
        self.is_copy = True
        self._failure = error
        return self.routes.all_channels()

    def refuse_copy(self) -> None:
        """Raises in a process that was forked from the one that has connected."""
        if self.is_copy:
            self.check()

    @property
    def failure(self) -> BaseException | None:
        """The error of the first failure, after which no message can be launched."""
        return self._failure

    def check(self) -> None:
        """Raises the failure, if there was one."""
        if self._failure is not None:
            raise self._failure

    def give_up(self, text: str, *, step: int | None = None) -> BaseException:
        """Ends the run on all ranks for a mistake of this rank's training loop.

        Returns the error to raise. ``step`` is the step that cannot be finished, by
        default the last step that began.
        """
        announced = f"on rank {self.rank} of {self.world} {text}"
        at = self._step if step is None else step
        return self.lose(
            (self.rank,), at, announced, "its own report", ExitCode.MISTAKE
        )

    def begin_call(self) -> None:
        """Shows that this rank has made a joint call, to others that wait in one."""
        self.num_calls += 1
        self._show(0)

    def sweep(self, part: str) -> None:
        """Deletes the store's keys under ``part``, soon; all ranks have read them."""
        if self._pulse is not None:
            self._pulse.sweep(part)

    def show_local_step(self, local_step: int) -> None:
        """Shows other ranks how many local steps this one has made."""
        self._local_step = local_step
        if self._pulse is not None:
            self._pulse.place = self._pulse.place._replace(local_step=local_step)

    def _show(self, launched: int) -> None:
        if self._pulse is not None:
            place = Place(self.num_calls, self._step, launched, self._local_step)
            self._pulse.place = place

    def _waits(self) -> bool:
        """Whether messages are under way, and this rank computes nothing for them."""
        is_computing = any(map(self._manager.is_busy, COMPUTING))
        return not is_computing and not all(end.done for end in self._tails)

    def signs(self) -> list[Sign]:
        """The progress of every rank, read anew; empty if the store does not answer."""
        return [] if self._pulse is None else self._pulse.signs()

    def next_epoch(self, own: Any, lost: Collection[int] = ()) -> dict[int, Any]:
        """The ranks of ``everyone`` that go on without its ``lost`` ranks.

        ``own`` is the value that this rank announces. See `epochs.next_epoch`.
        """
        if self._pulse is None or self._pulse.is_cut_off:
            return {}
        who = self.everyone
        return next_epoch(self._pulse, who, own, self.timeout, lost, self.num_together)

    def survive(self) -> None:
        """Notes that ranks go on after a loss in a step, so none ends its process."""
        if self._pulse is not None:
            self._pulse.lingers = False

    def lose(
        self,
        ranks: tuple[int, ...],
        step: int,
        text: str,
        how: str,
        code: int = ExitCode.RANK_LOST,
    ) -> BaseException:
        """Ends the run on all ranks because of ``ranks``; returns the error to raise.

        ``text`` says what happened, and ``how`` this rank came to know it.
        """
        places = self._among_all(ranks)
        if places != ranks:
            text += self.who.explained(ranks)
        return self.break_off(Alarm(places, step, text, code), how)

    def _among_all(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The numbers among ``everyone`` of ranks that average with this one."""
        return self.everyone.in_group(self.who.in_job(ranks))

    def break_off(
        self, alarm: Alarm, how: str, *, in_step: bool = False
    ) -> BaseException:
        """Raises an alarm on all ranks; returns the error of the first failure.

        The others get time to hear the alarm before this returns, as this process may
        end then. They need none if they survive a loss ``in_step``.
        """
        if self._failure is None:
            if self._pulse is not None:
                self._note_cut(self._pulse, alarm)
                lingers = self._pulse.lingers or not in_step
                alarm = self._pulse.raise_alarm(alarm, lingers=lingers)
            self._fail(failure_of(alarm, self.everyone, how))
        assert self._failure is not None
        return self._failure

    def _note_cut(self, pulse: Pulse, alarm: Alarm) -> None:
        """Notes if the network is parted, and this rank cannot reach the store.

        Then it writes no alarm to the store. Once the network is whole again, ranks on
        the store's side would read there that they are lost.
        """
        is_parted = alarm.code == ExitCode.NETWORK and bool(alarm.ranks)
        if is_parted and pulse.mute_s > PATIENCE_S:
            pulse.is_cut_off = True

    def finish_and_close(self) -> None:
        """Waits for the messages that were launched, as peers need them, and closes.

        It does not wait after a failure, nor longer than the time-out. The garbage
        collector may call it in a thread of a channel or a lane, which cannot wait for
        its own end. Then another thread does the work.
        """
        is_of_slots = threading.current_thread().name == THREADS
        if is_foreign() or is_of_slots or self._manager.is_own_thread():
            in_background(self.finish_and_close)
            return
        if self._failure is None:
            over = threading.Event()
            self.when_done(self._tails, lambda failure: over.set())
            over.wait(self.timeout.total_seconds())
        self.close()

    def detach(self) -> None:
        """Notes that this rank is about to leave by itself; its last sign says so."""
        if self._pulse is not None:
            self._pulse.detaches = True

    def close(self) -> None:
        """Ends the threads and gives the channels back.

        Another thread that still waits for a message gets an error.
        """
        if self.is_copy:
            return
        if self._failure is None:
            with suppress(RuntimeError):  # a server that is gone hears nothing
                self._tell_servers(is_step=False)
        self.servers = range(0)
        with self._lock:
            waiters = [waiter for waiter in self._waiters if not waiter.called]
            is_first = self._closed is None  # a dropped handle closes its engine again
            self._closed = InvalidSetting(
                "the exchange was closed in the middle of a step, by detach() in "
                "another thread; call it between two steps, on all ranks alike"
            )
            if waiters and self._failure is None:
                self._failure = self._closed
        for waiter in waiters:
            waiter(self._failure)
        # First: a rank that sees the channels close must see no pulse here any more.
        if self._pulse is not None:
            self._pulse.stop()
        self._manager.stop()
        if self.slots is not None:
            self.slots.stop(self._failure)
            self.slots = None
        if self._manager.join(_JOIN_S):
            self.routes.clear()
        else:
            # gloo cannot be stopped, and a half-read receive never notices that its
            # peer has closed.
            self._manager.abandon()
            in_background(self.routes.clear)  # it waits for as long as the time-out
        # the old tails hold gradients
        self._tails = [_NOTHING] * len(self._tails)
        self._last_turn = _NOTHING
        # once for each rank: the last one to leave deletes all notes
        if self.shards.world > 1 and is_first and self._failure is None:
            leave_soon(self.shards.name, self.shards.world)
        give_memory_back()

    def _observe(self, task: Task, start_s: float, end_s: float) -> None:
        lane = task.lane if task.lane in COMPUTING else "communication"
        done = task.name, start_s, end_s, task.size_bytes, task.step, task.message
        self._on_span(Span(self.rank, lane, *done))

    def _task_failed(self, task: Task, error: BaseException) -> None:
        """Ends the run for the first error in a task; called in the task's thread.

        This takes seconds and closes channels, so a channel's own thread has another
        thread do it.
        """
        if is_foreign():
            failing = in_background(lambda: self._task_failed(task, error))
            failing.add_done_callback(
                lambda one: self._fail(error) if one.exception() else None
            )
            return
        if self._pulse is None:
            self._fail(error)
            return
        # The steps raised it themselves, for values that all ranks had announced.
        if isinstance(error, RankFailed):
            places = self._among_all(error.ranks)
            step = max(error.step, self._step)
            alarm = Alarm(places, step, str(error), error.exit_code)
            how = "by what ranks announced"
        elif task.lane in (*COMPUTING, None) or is_interrupt(error):
            who = self.everyone
            text = f"rank {who.rank} of {who.world} raised {said(error)}"
            self._pulse.raise_alarm(
                Alarm((who.rank,), self._step, text, ExitCode.BROKEN)
            )
            self._fail(error)
            return
        else:
            alarm = blamed(self._pulse, task.name, self._step, self.everyone.world)
            how = f"{task.name}: {first_line(error)}"
        # An alarm of another rank that came in the meantime stands.
        self.break_off(alarm, how, in_step=True)

    def unreachable(
        self, name: str, error: BaseException, step: int = IN_ATTACH
    ) -> BaseException:
        """The error to raise if the operation ``name`` outside of messages has failed.

        This announces it to all ranks.
        """
        who = self.everyone
        alarm = blamed(self._pulse, name, step, who.world)
        if not alarm.ranks and alarm.code != ExitCode.UNAVAILABLE:
            text = (
                f"rank {who.rank} of {who.world} failed to {name} ({first_line(error)})"
            )
            text += ", and all ranks answer elsewhere"
            if name.startswith("connect"):
                text += loopback_name()
            alarm = Alarm((who.rank,), step, text, alarm.code)
        return self.break_off(alarm, f"{name}: {first_line(error)}")

    def broken(self, name: str, error: BaseException, step: int) -> BaseException:
        """The error to raise if a connection breaks; this announces it to all ranks.

        It names no rank if all ranks live.
        """
        alarm = blamed(self._pulse, name, step, self.world)
        return self.break_off(alarm, f"{name}: {first_line(error)}", in_step=True)

    def refuse_silence(self, step: int) -> None:
        """Raises on all ranks if a rank or the store is silent; this takes seconds."""
        alarm = self._pulse and silence(self._pulse, step, self.everyone.world)
        if alarm:
            raise self.break_off(alarm, "it waited for them")

    def watch(self, ranks: Callable[[], Collection[int]]) -> None:
        """Ends the run once the store or one of ``ranks()`` is silent for the time-out.

        This is for waits that have no time-out themselves. ``ranks()`` are the ranks
        that are waited for, maybe none.
        """
        pulse = self._pulse
        assert pulse is not None, "a rank alone waits for nobody"
        limit_s = self.timeout.total_seconds()
        # Finding out why a store is silent takes ``PATIENCE_S``, so it begins earlier.
        early_s = max(limit_s - PATIENCE_S, PATIENCE_S)

        def is_silent(rank: int) -> bool:
            return pulse.mute_s > early_s or pulse.still_s(rank) > limit_s

        def look() -> None:
            while not (self.failure or self._closed):
                if any(map(is_silent, ranks())):
                    self.refuse_silence(max(self._step, self._local_step))
                time.sleep(_LOOK_S)

        in_background(look)

    def _alarmed(self, alarm: Alarm) -> None:
        if self._pulse is not None:
            self._note_cut(self._pulse, alarm)
        self._fail(failure_of(alarm, self.everyone, "announced by another rank"))

    def _lose_store(self) -> None:
        # Announced, as ranks that look later would blame this rank, which ends now.
        alarm = blamed(self._pulse, "", self._step, self.everyone.world)
        self.break_off(alarm, "its store is lost")

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            is_first = self._failure is None
            if is_first or is_interrupt(error):
                self._failure = error
            waiters = list(self._waiters)
        if not is_first:
            return
        self._manager.stop()
        with ExitStack() as stack:  # each is done even if one before it raises
            if self.on_failure is not None:
                stack.callback(self.on_failure, error)
            for waiter in waiters:
                stack.callback(waiter, error)
            # This ends waits of NCCL. Waits of gloo end when a peer closes.
            for channel in self.routes.all_channels():
                stack.callback(channel.abort)
            # The stack calls the last one first: before anybody sees the error.
            stack.callback(
                self.routes.last_verbs.write, self.rank, self.world, error, said(error)
            )


@dataclass(slots=True)
class Driver:
    """Puts the verbs of one message's steps into the graph as tasks, and resumes them.

    ``lane`` is the number of its communication lane. ``side`` is the stream that
    computes the message, if a device does. ``compute`` does a task in the caller's
    thread. If the message ``is_inline``, it does all computations before the first verb
    for the network.
    """

    manager: TaskManager
    routes: Routes
    compute: Callable[[Task], Task]
    steps: Steps[Any]
    name: str
    index: int
    lane: int
    step: int
    side: SideStream | None = None
    is_inline: bool = False
    slots: SendScheduler | None = None
    """Carries sends and receives; None if they wait for the message's turn."""
    after: Sequence[Task] = ()
    """The tasks that sends in slots wait for, in place of the turn."""
    number: int = 0
    """The message's number among all that take slots."""
    turn: Task = field(init=False)
    """Done when the message may use its channel."""
    end: Task = field(init=False)
    """Done when the steps have returned; its result is their value."""
    _noted: NotedVerb | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.turn = self.short_task("turn", None)
        self.end = self.short_task(self.name, None)
        self.end.num_blockers = 1  # cleared by hand when the steps return

    def resume(self, value: Any = None) -> None:
        """Sends the steps their last results and puts the next verbs into the graph."""
        if self._noted is not None:
            self._noted.done_s = wall_clock()
            self._noted = None
        try:
            with as_on_a_lane(self.side):  # this may be the thread of the backward pass
                asked = self.steps.send(value)
                while self._computes_here(asked):
                    asked = self.steps.send(self._computed(asked))
        except StopIteration as stop:
            self._finish(stop.value)
            return
        self.is_inline = False
        self._schedule(asked)

    def _computes_here(self, asked: Verb | tuple[Verb, ...]) -> bool:
        """Whether this thread does all that the steps ask for, without a lane.

        It does small computations. If the message ``is_inline``, it does all of them
        before the first verb for the network.
        """
        if isinstance(asked, tuple):
            return all(map(self._computes_here, asked))
        return isinstance(asked, Compute) and (
            self.is_inline or (self.side is None and asked.is_small)
        )

    def _computed(self, asked: Verb | tuple[Verb, ...]) -> Any:
        """Does computations in this thread; returns their results."""
        lane = INLINE if self.is_inline else COMPUTE
        verbs = asked if isinstance(asked, tuple) else (asked,)
        tasks = [
            self.compute(self.task(verb.name, verb.fn, lane))
            for verb in verbs
            if isinstance(verb, Compute)
        ]
        return _results(asked, tasks)

    def _finish(self, value: Any) -> None:
        """Ends the message with the value that its steps returned."""
        self.end.result = value
        self.end.num_blockers = 0
        self.manager.add(self.end, [self.turn])

    def _schedule(self, asked: Verb | tuple[Verb, ...]) -> None:
        """Makes tasks of verbs, and puts them into the graph."""
        verbs = asked if isinstance(asked, tuple) else (asked,)
        network = [verb for verb in verbs if not isinstance(verb, Compute)]
        computations = [verb for verb in verbs if isinstance(verb, Compute)]
        computes = [self.task(verb.name, verb.fn) for verb in computations]
        in_slots: list[Task] = []
        if self.slots is not None:
            network, in_slots = self._in_slots(network, self.slots)
        apart = computes
        wire = []
        if network:
            channel = self.routes.of(network, self.index, self.lane)[0]
            beside = []
            is_carried = not is_begun(network, channel)
            if is_carried and all(map(self._computes_here, computations)):
                beside = computes
                apart = []
            # Verbs for the network that may run at once are one task, started together.
            wire = [self._communication(network, beside)]
        self._then(lambda: _results(asked, computes), apart, wire, in_slots)

    def _in_slots(
        self, network: Sequence[Communication], slots: SendScheduler
    ) -> tuple[list[Communication], list[Task]]:
        """Parts verbs: those that wait for the message's turn, and tasks of sends that
        take slots.
        """
        group = self.routes.groups[Among.RANKS]
        left = []
        tasks = []
        for asked in network:
            with as_on_a_lane():
                verbs = as_sends(asked, group.rank, group.world)
            for verb in verbs:
                if not isinstance(verb, (Send, Recv)):
                    left.append(verb)
                    continue
                size_bytes = self.routes.sent_bytes(verb)
                lane = self.routes.lanes[self.lane]
                task = self.task(_name(verb), lambda: None, lane, size_bytes)
                task.begin = partial(slots.offer, self.number, verb)
                tasks.append(task)
        return left, tasks

    def _then(
        self,
        value: Callable[[], Any],
        works: list[Task],
        wire: list[Task],
        in_slots: Sequence[Task] = (),
    ) -> None:
        """Starts the tasks of verbs; once all are done, ``value()`` resumes the steps.

        ``works`` wait for nothing, ``wire`` for the message's turn, and ``in_slots``
        for ``after``.
        """
        resume = self.short_task("resume", lambda: self.resume(value()))
        # The resuming task must wait before any of the others can be done.
        tasks = (*works, *wire, *in_slots)
        resume.num_blockers = len(tasks)
        for task in tasks:
            task.dependents.append(resume)
        if not resume.num_blockers:
            self.manager.add(resume)
        for task in works:
            self.manager.add(task)
        for task in wire:
            self.manager.add(task, [self.turn])
        for task in in_slots:
            self.manager.add(task, self.after)

    def _communication(
        self, verbs: Sequence[Communication], meanwhile: Sequence[Task]
    ) -> Task:
        """The task of verbs for the network: all that a message sends begins here.

        Most verbs are carried out by the lane's thread, which starts them and waits for
        their end. Before it waits, it does the small computations of ``meanwhile``. If
        the channel itself reports a verb's end, no thread waits, and the verb is only
        started. Of a message on a device, the device's own channel carries ``direct``
        verbs out, and the others pass through host memory.
        """
        routes = self.routes
        index = self.index
        lane = self.lane
        side = self.side
        channel = routes.of(verbs, index, lane)[0]  # raises where there is none
        direct, others = ([], verbs) if side is None else routes.parted(verbs, lane)
        seals = routes.seals(others, self.step)
        beside = filter(None, seals.beside) if seals else ()
        size_bytes = sum(map(routes.sent_bytes, (*verbs, *beside)))
        name = "+".join(map(_name, verbs))
        noted = routes.last_verbs.launch(self.step, index, name, size_bytes)
        self._noted = noted

        # The channel is looked up late: a task that never runs must not keep it open.
        def carry(held: Sequence[Communication]) -> None:
            if held:
                channels = routes.of(others, index, lane)
                carry_out(held, channels, seals, straight=True, meanwhile=compute)

        def compute() -> None:
            for task in meanwhile:
                self.compute(task)

        through_device: Callable[[], None] | None = None
        if side is not None:
            through_device = self._through_device(side, direct, others, carry)

        def work() -> None:
            noted.started_s = wall_clock()
            if through_device is None:
                carry(others)
            else:
                through_device()

        def start(over: Over) -> None:
            noted.started_s = wall_clock()
            begin(verbs[0], routes.of(verbs, index, lane)[0], over, seals)

        task = self.task(name, work, routes.lanes[lane], size_bytes)
        if through_device is None and is_begun(verbs, channel):
            task.begin = start
        return task

    def _through_device(
        self,
        side: SideStream,
        direct: Sequence[Communication],
        others: Sequence[Communication],
        carry: Callable[[Sequence[Communication]], None],
    ) -> Callable[[], None] | None:
        """A function that carries out a device's verbs; None if all are on the host.

        ``carry`` carries ``others`` out in host memory.
        """
        groups = self.routes.groups
        ranks = [groups[verb.among].rank for verb in others]
        staged = side.staging.out(self.index, others, ranks, side.kind, side.stream)
        ready = side.record_event() if direct else None
        if staged is None and ready is None:
            return None

        def carry_all() -> None:
            if ready is not None:
                with side.wired(ready):
                    channels = [groups[verb.among].direct for verb in direct]
                    carry_directly(direct, channels, side.device)
            if staged is None:
                carry(others)
                return
            staged.wait()
            carry(staged.verbs)
            staged.back()

        return carry_all

    def task(
        self, name: str, fn: Callable[[], Any], lane: str = COMPUTE, size_bytes: int = 0
    ) -> Task:
        """A task of this message; tasks that are ready on a lane run in issue order."""
        if self.side is not None and lane == COMPUTE:
            fn = self.side.on(fn)
        order = self.step, self.index
        return Task(name, fn, lane, order, self.step, self.index, size_bytes)

    def short_task(self, name: str, fn: Callable[[], Any] | None) -> Task:
        """A task of this message without a lane; the thread that frees it does it."""
        return Task(name, fn, step=self.step, message=self.index)


def _results(asked: Verb | tuple[Verb, ...], tasks: Sequence[Task]) -> Any:
    """The results of verbs: those of computations, and None for the network."""
    if not isinstance(asked, tuple):
        return tasks[0].result if tasks else None
    left = iter(tasks)
    # A list first, and not tuple(generator): a thread that looks at all objects of the
    # process, as attach does, may break a tuple that is being filled (CPython's "bad
    # argument").
    results = [
        next(left).result if isinstance(verb, Compute) else None for verb in asked
    ]
    return tuple(results)


def _name(verb: Communication) -> str:
    return f"{type(verb).__name__}{verb.among.ending}"


def rows_of_all(world: int, own_N: Tensor, among: Among = Among.RANKS) -> Steps[Tensor]:
    """The steps by which ranks exchange rows of one length; returns all rows, in rank
    order.
    """
    rows_WN = own_N.repeat(world, 1)
    sizes = (own_N.numel(),) * world
    yield AllToAll(rows_WN.view(-1), own_N.repeat(world), sizes, sizes, among)
    return rows_WN


def figures_of_all(
    engine: Engine, own: Sequence[float], among: Among = Among.RANKS
) -> list[list[float]]:
    """Every rank's figures, in rank order."""
    return announced_meanwhile(engine, own, among)()


def announced_meanwhile(
    engine: Engine, own: Sequence[float], among: Among = Among.RANKS
) -> Callable[[], list[list[float]]]:
    """Has ranks announce their figures while the caller goes on.

    Returns a function. It waits for the figures of all ranks, and returns them in rank
    order.
    """
    world = engine.world if among is Among.RANKS else engine.shards.world
    if world == 1:
        return lambda: [list(own)]
    own_N = torch.tensor(own, dtype=torch.float64, device="cpu")
    steps = rows_of_all(world, own_N, among)
    how = CONTROL if among is Among.RANKS else BETWEEN_STEPS
    end = engine.launch(0, "figures", steps, how)

    def rows() -> list[list[float]]:
        engine.wait([end])
        found: list[list[float]] = end.result.tolist()
        return found

    return rows
