"""Synchroniser: from "this gradient is ready" to "all gradients are means".

Messages are launched in issue order, each as soon as it and all before it are complete.
Gradients may become ready in any order, which may differ between ranks. All ranks still
launch messages in the same order.

In each step the ranks of a plain module also report which parameters they used. Its
last message carries these flags if it is dense. Otherwise a report carries them, on a
channel of its own, as it must not wait behind a large message (`report`). A parameter
that no rank used keeps the gradient None on every rank, as in plain training. Its
residual waits for the parameter's next use.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from ...contract.state import leaves
from ...contract.verbs import Steps
from ..device.devices import HOST
from ..device.streams import Offload, SideStream, StepEvents, Streams
from ..engine.engine import CONTROL, INLINE, OFFLOAD, Engine, Launch
from ..transport.task_graph import Task
from ..transport.wire import as_on_a_lane
from .buffer import Grads
from .messages import Message
from .report import Check, Record, StepReport

_LET_GO = torch.empty(0, device="cpu")
"""Stands for a gradient that has its mean. A reference to the gradient itself would
keep memory alive that the user frees.
"""


class Synchroniser:
    """One rank's view of the messages of a model.

    ``begin`` opens a step of all parameters, or of the parameters of some messages.
    ``ready`` hands in gradients, ``close`` ends the backward pass, and ``finish``
    waits. Means are written into the gradients that were handed in. ``params`` are all
    parameters that are exchanged, by name; one without elements is in no message. In
    some steps ranks ``check`` that they hold the same parameters; see `integrity`.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[Message],
        params: dict[str, Tensor],
        check: Check | None = None,
    ) -> None:
        self.engine = engine
        self.check = check or Check(None, lambda names: [])
        self.report = StepReport(self.check, engine.world)
        self.takes_means = True
        """Whether parameters without a gradient here get the means of other ranks."""
        self.counts_use = False
        """Whether ranks report which parameters each of them used.

        Under DDP they do not, as DDP hands in zeros for unused parameters.
        """
        self.undoes_skipped = False
        """Whether a loss scaler may skip steps, which are undone then."""
        self.known: dict[frozenset[str], None] = {}
        """The parameters of each optimizer that the scaler has stepped or skipped."""
        self._infinite: set[str] = set()
        """The parameters with a non-finite mean since their optimizer's last step."""
        self.streams = Streams()
        self.params = params
        self.names = list(params)
        self._lock = threading.Lock()
        self.open = False
        self._scale = 1.0
        self.replace(messages)
        self._clear(0)

    def _clear(self, step: int) -> None:
        """Forgets the step before; ``step`` is the next one."""
        self._step = step
        self.grads: Grads = {}
        """The gradients that were handed in, by parameter name."""
        self._events = StepEvents(self.streams)
        self._shared: set[str] = set()
        """The gradients whose memory other code may read until ``close``."""
        self._backward_over = Task("backward over", None, step=step)
        self._missing = [len(message.names) for message in self.messages]
        """By message: the number of its gradients that were not handed in yet."""
        self._num_left = {
            name: len(messages) for name, messages in self._messages_of.items()
        }
        """By parameter: the number of its messages that have not ended yet."""
        self._queue = self.messages
        """The messages of this step, in issue order."""
        self._ends: dict[int, Task] = {}
        """The ends of the launched messages, by their indices."""
        self._ahead: dict[int, list[Task]] = {}
        """By message: tasks that encode tensors of it before it is launched."""
        self._reporting: list[Task] = []
        self._confirming: list[Task] = []

    def replace(self, messages: Sequence[Message]) -> None:
        """Replaces the messages from the next step on; parameters stay the same."""
        assert not self.open, "messages are replaced between two steps"
        self.messages = list(messages)
        self.streams.staging.clear()
        self._messages_of: dict[str, list[Message]] = {name: [] for name in self.names}
        for message in self.messages:
            for name in message.names:
                self._messages_of[name].append(message)
        self._flags_F = self.messages[-1].buffer.flags_F if messages else None
        """The sum of all ranks' flags: above 0 where one of them used the parameter."""
        self.keeps_state = any(any(leaves(m.state)) for m in self.messages)
        """Whether messages keep anything for later steps."""
        self.taken: set[str] = set()
        """The parameters whose means an optimizer took, if a scaler decides steps."""
        self._used_since: set[str] = set()
        """The parameters that any rank used since their optimizer's last step."""
        rows = [message for message in self.messages if message.buffer.is_of_rows]
        self.row_sparse = {name for message in rows for name in message.names}
        """The parameters whose modules declare row-sparse gradients."""
        for message in self.messages:
            message.take_scale(self._scale)

    def go_on(self, engine: Engine, messages: Sequence[Message]) -> None:
        """Goes on among the ranks of ``engine``, with messages for them.

        An open step is dropped.
        """
        self.engine = engine
        self.open = False
        self.report.restart(engine.world)
        self.check.forget()
        self.replace(messages)

    def begin(
        self,
        step: int,
        scale: float = 1.0,
        names: Collection[str] | None = None,
        *,
        own_step: int | None = None,
    ) -> None:
        """Opens a step, whose gradients will all have this ``scale``.

        ``names`` are the parameters that take part; None stands for all. A message
        carries only such parameters, or none of them. ``own_step`` counts the steps of
        these parameters, if not all take part in each.
        """
        self.engine.check()
        self.engine.begin_step(step)
        if scale != self._scale:
            self._scale = scale
            for message in self.messages:
                message.take_scale(scale)
        self._clear(step)
        if self.streams.sides:
            # No event precedes a message to which this rank hands in no gradient.
            self.streams.lead()
        if names is not None:
            self._queue = self.of(names)
        self._own_step = step if own_step is None else own_step
        self.look(self._own_step, names)
        looks = self._looks
        confirms = self.report.confirms
        if looks or confirms:
            for message in self.messages:
                message.begin_step(looks=looks, confirms=confirms)
        self.open = True

    @property
    def _looks(self) -> bool:
        """Whether messages look for infs and NaNs, as a skipped step is undone."""
        return self.undoes_skipped and self.keeps_state

    def look(self, own_step: int, names: Collection[str] | None = None) -> None:
        """Takes digests of tensors that must be equal on all ranks, in some steps.

        It is called as a step's backward pass begins. ``own_step`` alone decides
        whether ranks compare these tensors in this step; see `Check`.
        """
        if self.engine.world > 1:
            self.check.look(own_step, names)

    def ready(self, name: str, grad: Tensor | None, *, is_shared: bool = False) -> None:
        """Hands in one gradient (None counts as zero) and launches complete messages.

        A gradient that ``is_shared`` gets its mean only after ``close``: other code may
        read its memory during the backward pass.
        """
        self.engine.check()
        with self._lock:
            if name in self.grads:
                return
            self.grads[name] = grad
            if is_shared:
                self._shared.add(name)
            if grad is not None and not grad.is_cpu:
                self._events.ready(name, grad)
            for message in self._messages_of[name]:
                self._missing[message.index] -= 1
                if grad is not None and name in message.lanes:
                    self._encode_ahead(message, name)
            while len(self._ends) < len(self._queue):
                message = self._queue[len(self._ends)]
                if self._missing[message.index]:
                    break
                self._ends[message.index] = self._launch(message)
                if len(self._ends) == len(self._queue):
                    self._report()

    def _side(self, message: Message) -> SideStream | None:
        """The stream that computes a message; None if the host computes it."""
        return None if message.device == HOST else self.streams.side(message.device)

    def _encode_ahead(self, message: Message, name: str) -> None:
        """Encodes one tensor on the lane of the plan, before its message is launched.

        The thread of the backward pass encodes tensors of ``PlannedMessage.inline`` at
        once. The compute lane encodes tensors of ``PlannedMessage.early``. If they lie
        on a device, the host encodes copies in pinned memory, on a lane of its own.
        """
        engine = self.engine
        step = self._step
        index = message.index
        lane = message.lanes[name]
        side = self._side(message)
        grads = self.grads
        numel_bytes = self.params[name].numel() * message.spec.dtype.itemsize
        copying = self._events.copying([name], side, to_host_bytes=numel_bytes)

        def task(what: str, work: Callable[[], None], lane: str) -> Task:
            return Task(f"{what} {name}", work, lane, (step, index), step, index)

        encode: Callable[[], None]
        if lane == OFFLOAD:
            assert side is not None, "only what lies on a device is offloaded"
            copies = message.encode_on_host(name, grads, copying)
            way = Offload(copies, index, name, side)
            with as_on_a_lane():
                engine.do_inline(task("copy", way.leave, INLINE))
            encode = way.encode
        else:
            encode = partial(message.encode_ahead, name, grads, copying)
            if side is not None:
                encode = side.on(encode)
        made = task("encode", encode, lane)
        if lane == INLINE:
            with as_on_a_lane():
                engine.do_inline(made)
        else:
            engine.begin(made)
        self._ahead.setdefault(index, []).append(made)

    def _launch(self, message: Message) -> Task:
        """Has the engine carry a message out: the one place where it is sent."""
        # Local names: the functions below use those of this step, even after the next
        # step has begun.
        grads = self.grads
        num_left = self._num_left
        events = self._events
        names = message.names
        buffer = message.buffer
        side = self._side(message)
        if buffer.flags_F is not None:
            with nullcontext() if side is None else side.use():
                buffer.flags_F.copy_(
                    torch.frombuffer(bytearray(self._used()), dtype=torch.uint8)
                )
        is_shared = not self._shared.isdisjoint(names)
        borrows = not is_shared and buffer.can_borrow(grads)
        rows = buffer.is_of_rows
        size_bytes = 0 if rows else message.spec.size_bytes
        gathering = events.copying(names, side, to_host_bytes=size_bytes)
        scattering = events.copying(
            names, side, to_device_bytes=size_bytes, allocates=rows
        )
        steps = message.steps(grads, gathering, borrows=borrows)

        def end() -> None:
            events.end(message.index, side)
            for name in names:  # gradients that have their means
                num_left[name] -= 1
                if not num_left[name] and grads[name] is not None:
                    grads[name] = _LET_GO

        def scatter() -> None:
            with as_on_a_lane():  # it may be the thread of the backward pass
                buffer.scatter(grads, scattering)
            end()

        how = Launch(
            behind=self._ahead.pop(message.index, ()),
            after=[self._ends[i] for i in message.after],
            last=None if borrows else scatter,
            last_behind=[self._backward_over] if is_shared else (),
            last_is_light=not rows and (side is not None or not events.has_any),
            is_inline=message.is_inline,
            side=side,
        )
        if borrows:
            steps = _ended(steps, end)
        return self.engine.launch(message.index, f"message {message.index}", steps, how)

    def abandon(self, name: str, *, is_retry: bool = False) -> None:
        """Gives up a step whose backward pass did not end.

        A second gradient of the parameter ``name`` showed this. A rank that is alone
        forgets the step. Several ranks forget it if each of them calls this with
        ``is_retry``, and the messages' state can be put back: see `retry`. Otherwise
        this raises ``LoopMistake``.
        """
        if self.engine.world > 1:
            # servers repeat nothing
            may_repeat = is_retry and not self.engine.servers
            if not may_repeat or (self.keeps_state and not self.report.confirms):
                raise self.engine.give_up(
                    f"the gradient of {name} came after an earlier backward pass that "
                    "raised before its end, or twice in one, as the parameter is "
                    "shared by segments of a reentrant activation checkpoint "
                    "(use_reentrant=False is accepted). A pass that raised can be "
                    "repeated, by all ranks, after zero_grad(set_to_none=True), where "
                    "the exchange keeps no state (residuals, momenta, counters of "
                    "draws), or attach was given on_failure='shrink'"
                )
            from .retry import repeat_together  # a pass that raised is rare

            repeat_together(self.engine, self._step, len(self._queue))
            for absent in self.names:
                self.ready(absent, None)
        self.close()
        self.engine.wait(self.all_ends())
        self._events.follow()
        self.undo()
        self.open = False

    @property
    def complete(self) -> bool:
        """Whether the open step has all gradients handed in, all messages launched."""
        launched = len(self._ends) == len(self.messages)
        return launched and len(self.grads) == len(self.names)

    def of(self, names: Collection[str]) -> list[Message]:
        """The messages that carry any of ``names``, in issue order."""
        return [self.messages[index] for index in self.ends_of(names)]

    def ends_of(self, names: Collection[str]) -> list[int]:
        """Indices of the messages that carry any of ``names``."""
        return sorted({m.index for name in names for m in self._messages_of[name]})

    def ends(self, indices: Sequence[int]) -> list[Task]:
        """The ends of messages; a message that is not launched yet is left out."""
        return [self._ends[index] for index in indices if index in self._ends]

    def all_ends(self) -> list[Task]:
        """Ends of the messages launched so far, and of the report beside them."""
        return [*self._ends.values(), *self._reporting, *self._confirming]

    def used(self) -> set[str]:
        """The parameters that any rank used in the last pass; the same on all ranks."""
        if not self.counts_use:
            return {*self.names}
        flags_F = self._flags_F
        used = self.report.used if flags_F is None else flags_F.tolist()
        return {name for name, is_used in zip(self.names, used, strict=True) if is_used}

    def arrived(self, name: str) -> bool:
        """Whether a parameter's mean is there, or will be by the device's stream."""
        return all(
            self._ends[message.index].done for message in self._messages_of[name]
        )

    def wait(self, names: Sequence[str]) -> None:
        """Blocks until the means of ``names`` are there.

        Call it once all gradients of the step are handed in. If a device computes the
        means, its current stream waits for them: see ``follow``.
        """
        self.engine.wait([self._ends[index] for index in self.ends_of(names)])
        self.follow(names)

    def follow(self, names: Sequence[str]) -> None:
        """Has the device's current stream wait for means that have ``arrived``."""
        self._events.follow(self.ends_of(names))

    def mean(self, name: str) -> Tensor:
        """A new tensor with the mean of a parameter for which this rank handed in None.

        It has the parameter's strides, which torch's fused optimizers expect.
        """
        mean = torch.empty_like(self.params[name])
        for message in self._messages_of[name]:
            mean = message.buffer.put_mean(name, mean)
        return mean

    def close(self) -> None:
        """Notes the end of the backward pass; all gradients are handed in."""
        self._events.close()
        self.engine.begin(self._backward_over)
        # No message exists if all parameters, or this rank's parts of them, are empty.
        if not self._queue:
            self._report()

    def _report(self) -> None:
        """Sends this rank's record, if the step has one; see `report`.

        All messages are launched by then, and the record travels beside the last ones.
        If ranks confirm steps, a second record follows once all means are here.
        """
        engine = self.engine
        report = self.report
        digests = self.check.taken(self._own_step)
        counts = self.counts_use and self._flags_F is None
        used = self._used() if counts else b""
        index = len(self.messages)
        if engine.world == 1:
            report.records = [Record(newcomer=report.look(), used=used)]
            return
        if counts or digests:
            steps = report.steps(self._step, used, digests)
            self._reporting = [engine.launch(index, "report", steps, CONTROL)]
        if report.confirms:
            steps = report.confirmation(self._step, used, self.messages, self.streams)
            ends = self.all_ends()
            how = Launch(behind=ends, is_control=True)
            end = engine.launch(index + 1, "confirmation", steps, how)
            self._confirming = [end]

    @property
    def is_whole(self) -> bool:
        """Whether all means of the open step are here; other ranks may lack theirs."""
        return bool(self.open and self._confirming) and all(
            end.done for end in (*self._ends.values(), *self._reporting)
        )

    def _used(self) -> bytes:
        """For each parameter 1 if this rank used it in the step, else 0."""
        # A parameter without elements may not be handed in yet: no message needs it.
        return bytes([self.grads.get(name) is not None for name in self.names])

    def finish(self) -> set[str]:
        """Waits for all means.

        Returns the parameters for which this rank handed in None and which have a mean.
        A parameter that no rank used is not among them: its gradient stays None on
        every rank, as in plain training, and its residual waits for its next use.
        """
        self.engine.wait(self.all_ends())
        return self.settled()

    def undo(self) -> None:
        """Puts back the state of messages that the open step began to change."""
        for message in self.messages:
            message.backup.end_pass(undoes=True)

    def end_step(self) -> None:
        """Notes that all means of a backward pass are here.

        The scaler decides later whether optimizers take its means: see ``decide``.
        """
        if self._looks:
            for message in self.messages:
                self._infinite |= message.buffer.infinite()
            self._used_since |= self.used()
        if self._looks or self.report.confirms:
            for message in self.messages:
                message.backup.end_pass()
        if self._looks and not self.check.trains:
            # No scaler of this rank steps, as its data have ended.
            self.decide_by_means({*self.names})

    def decide(self, names: Collection[str], *, is_skipped: bool) -> None:
        """Keeps or undoes the exchanges of one optimizer's parameters.

        They are undone if the scaler has skipped the optimizer's step. Means have the
        same bits on all ranks, so all scalers find the same infs.
        """
        names = frozenset(names)
        self.known[names] = None
        self._decide(names, is_skipped=is_skipped)

    def decide_by_means(self, names: Collection[str]) -> None:
        """Like ``decide``, for parameters about which no scaler decides.

        The exchanges of an optimizer's parameters are undone together if one of their
        means is not finite. The parameters of ``names`` without a known optimizer are
        treated as those of one optimizer.
        """
        rest = {*names}.difference(*self.known)
        for group in [*self.known, frozenset(rest)]:
            own = group.intersection(names)
            self._decide(own, is_skipped=not self._infinite.isdisjoint(group))

    def _decide(self, names: frozenset[str], *, is_skipped: bool) -> None:
        for message in self.messages:
            message.backup.decide(names, is_skipped=is_skipped)
        if not is_skipped:
            self.taken |= names & self._used_since
        self._infinite -= names
        self._used_since -= names

    def forget_steps(self) -> None:
        """Drops undecided steps, for example once another state is loaded."""
        for message in self.messages:
            message.backup.forget()
        self._infinite.clear()
        self._used_since.clear()

    def settled(self) -> set[str]:
        """Closes a step whose means are all here; returns the same as ``finish``."""
        self._events.follow()
        self.open = False
        return self.take_back_unused()

    def take_back_unused(self) -> set[str]:
        """Undoes the exchange of parameters that no rank used; all means are here.

        Returns the same as ``finish``.
        """
        absent = {name for name, grad in self.grads.items() if grad is None}
        arrived = absent & self.used() if absent else absent
        for name in absent - arrived:
            for message in self._messages_of[name]:
                message.take_back(name)
        return arrived if self.takes_means else set()


def _ended(steps: Steps[None], end: Callable[[], None]) -> Steps[None]:
    """The same steps, which call ``end`` at their end."""
    yield from steps
    end()
