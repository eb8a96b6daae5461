"""Synchroniser: from "this gradient is ready" to "all gradients are means".

Messages are launched in issue order, each as soon as it and all before it are complete. So
gradients may become ready in any order, even in another one on each rank, and still every rank
launches messages in the same order.

Once a step ranks also count which of them used each parameter. The count travels behind a plain
module's last message if that is dense, and else beside the messages, on a channel of its own: it
must not wait behind a large one. A parameter that no rank used keeps the gradient None everywhere,
as in plain training, and its residual waits for its next use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ...contract.state import leaves
from ...contract.verbs import AllReduce, Steps
from ..device.streams import Streams
from ..failure.integrity import Check
from .encoding import begun, encode_ahead
from .engine import Engine
from .lanes import Task
from .marks import StepMarks
from .messages import Grads, Message

if TYPE_CHECKING:
    from ..failure.commit import Commit
    from .sparse_message import SparseMessage

AnyMessage: TypeAlias = "Message | SparseMessage"
_LET_GO = torch.empty(0, device="cpu")
"""A stand-in for a gradient that has its mean. The gradient itself would hold memory that the user
freed."""


class Synchroniser:
    """One rank's view of the messages of a model.

    ``begin`` opens a step, of all parameters or of those of some messages, ``ready`` hands in
    gradients, ``close`` counts who used which parameter, ``finish`` waits. Means are written into
    the gradients that were handed in. ``params`` are all parameters that are exchanged, by name;
    one without elements is in no message. In some steps ranks ``check`` that they hold the same
    parameters; see `integrity`.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[AnyMessage],
        params: dict[str, Tensor],
        check: Check | None = None,
    ) -> None:
        self.engine = engine
        self.check = check
        self.streams = Streams()
        self._params, self.names = params, list(params)
        self._lock = threading.Lock()
        # Under DDP, which hands in zeros for a gradient that is None, nobody counts: all are used.
        self._used = torch.ones(len(self.names), dtype=torch.int32, device="cpu")
        self.open = False
        self.commit: Commit | None = None
        """Steps count on all ranks or on none by it; None where a failure ends the run."""
        self._committing: list[Task] = []
        self._step = 0
        self._scale = 1.0
        self.replace(messages)
        self.grads: Grads = {}
        self._marks = StepMarks(self.streams)
        self._shared: set[str] = set()
        self._backward_over = Task("backward over", lambda: None)
        self._missing: list[int] = []
        self._num_left: dict[str, int] = {}
        self._queue = self.messages
        self._ends: dict[int, Task] = {}
        self._ahead: dict[int, list[Task]] = {}
        self._news: list[Task] = []

    def replace(self, messages: Sequence[AnyMessage]) -> None:
        """Has other messages carry the same parameters, from the next step on."""
        assert not self.open, "messages are replaced between two steps"
        self.messages = list(messages)
        self.streams.staging.clear()
        self.flat_messages = [m for m in self.messages if isinstance(m, Message)]
        """All messages but those of row-sparse gradients, which keep no state."""
        self._messages_of: dict[str, list[AnyMessage]] = {name: [] for name in self.names}
        for message in self.messages:
            for name in message.names:
                self._messages_of[name].append(message)
        told = [m.flags_F for m in self.flat_messages if m.flags_F is not None]
        self._told_F = told[-1] if told else self._used
        """The sum of all ranks' flags: above 0 for each parameter that one of them used."""
        slots = [slot for message in self.flat_messages for slot in message.slots]
        self._cut = {slot.name for slot in slots if not slot.is_whole}
        for message in self.flat_messages:
            message.scale = self._scale

    def go_on(self, engine: Engine, messages: Sequence[AnyMessage], commit: Commit) -> None:
        """Goes on among other ranks, with messages for these; what is open is dropped."""
        self.engine, self.commit, self.open = engine, commit, False
        self.forget_look()
        self.replace(messages)

    def begin(
        self,
        step: int,
        scale: float = 1.0,
        names: Collection[str] | None = None,
        *,
        turn: int | None = None,
    ) -> None:
        """Opens a step without gradients; all that are handed in will have this scale.

        ``names`` are the parameters that take part, and no message has others beside them; None
        stands for all. ``turn`` counts the steps of these parameters, if not all take part in each.
        """
        self.engine.check()
        self.engine.begin_step(step)
        self._step = step
        if scale != self._scale:
            self._scale = scale
            for message in self.flat_messages:
                message.scale = scale
        self.grads = {}
        self._marks = StepMarks(self.streams)
        self.streams.lead()  # a message without gradients of this rank is behind no mark
        self._queue = self.messages if names is None else self.of(names)
        self._shared = set()
        self._backward_over = Task("backward over", lambda: None, step=step)
        self._missing = [len(m.names) for m in self.messages]
        self._num_left = {name: len(messages) for name, messages in self._messages_of.items()}
        self._ends = {}
        self._ahead = {}
        self._news, self._committing = [], []
        self._num_compared = 0
        turn = step if turn is None else turn
        self.look(turn, names)
        if self.check is not None and (text := self.check.text(self.engine.world, step, turn)):
            index = len(self.messages) + 1
            self._news.append(self.engine.launch(index, "digests", text, is_news=True))
            self._num_compared = 1
        if self.commit is not None:
            self.commit.begin(self.flat_messages)
        self.open = True

    def forget_look(self) -> None:
        """Drops what was noted for a step that is not made, as state is loaded or ranks change."""
        if self.check is not None:
            self.check.forget()

    def trains(self, does: bool) -> None:
        """Notes whether this rank steps its parameters; see `Check`."""
        if self.check is not None:
            self.check.trains = does

    def look(self, turn: int, names: Collection[str] | None = None) -> None:
        """Notes what ranks must hold alike as the backward passes of a step begin; see `Check`."""
        if self.check is not None and self.engine.world > 1:
            self.check.look(turn, names)

    def ready(self, name: str, grad: Tensor | None, *, is_shared: bool = False) -> None:
        """Hands in one gradient (None counts as zero) and launches messages that are complete.

        Nothing is written to a gradient that ``is_shared`` before ``close``: somebody else may look
        at its memory while the backward pass goes on.
        """
        self.engine.check()
        with self._lock:
            if name in self.grads:
                return
            self.grads[name] = grad
            if is_shared:
                self._shared.add(name)
            if grad is not None:
                self._marks.ready(name, grad)
            for message in self._messages_of[name]:
                self._missing[message.index] -= 1
                if grad is not None and isinstance(message, Message) and name in message.lanes:
                    self._encode_ahead(message, name)
            while len(self._ends) < len(self._queue):
                message = self._queue[len(self._ends)]
                if self._missing[message.index]:
                    break
                self._ends[message.index] = self._launch(message)

    def _encode_ahead(self, message: Message, name: str) -> None:
        """Has one tensor encoded where the plan says, before its message is launched."""
        side = self.streams.side(message.device)
        numel_bytes = self.numel(name) * message.spec.dtype.itemsize
        copying = self._marks.copying([name], side, to_host_bytes=numel_bytes)
        own = self.engine, self._step, message, name, self.grads
        task = encode_ahead(*own, copying, side)
        self._ahead.setdefault(message.index, []).append(task)

    def _launch(self, message: AnyMessage) -> Task:
        # All of this step, even if it is abandoned.
        grads, num_left, marks = self.grads, self._num_left, self._marks
        names, side, size_bytes = message.names, self.streams.side(message.device), 0
        if isinstance(message, Message):
            size_bytes = message.spec.size_bytes
            if message.flags_F is not None:
                with nullcontext() if side is None else side.use():
                    self._write_flags(message.flags_F)
        copying = self._marks.copying(names, side, to_host_bytes=size_bytes)
        scattering = self._marks.copying(names, side, to_device_bytes=size_bytes)
        if not isinstance(message, Message):  # of rows
            scattering = self._marks.copying(names, side, allocates=True)
        is_shared = not self._shared.isdisjoint(names)

        def end() -> None:
            marks.end(message.index, side)
            if isinstance(message, Message):
                _let_go(names, grads, num_left)

        def scatter() -> None:
            message.scatter(grads, scattering)
            end()

        def borrowed(text: Steps[None]) -> Steps[None]:
            yield from text
            end()

        last: tuple[str, Callable[[], None]] | None = ("scatter", scatter)
        text: Steps[None] = message.text(grads, copying)
        if isinstance(message, Message) and not is_shared and message.can_borrow(grads):
            text, last = borrowed(message.text(grads, copying, borrows=True)), None
        if isinstance(message, Message) and self.commit is not None:
            text = self.commit.keeping(message, text)
        if isinstance(message, Message) and message.is_inline:
            text = begun(self.engine, self._step, message.index, text, side)
        return self.engine.launch(
            message.index,
            f"message {message.index}",
            text,
            behind=self._ahead.pop(message.index, ()),
            after=[self._ends[i] for i in message.after],
            last=last,
            last_behind=[self._backward_over] if is_shared else (),
            last_is_light=isinstance(message, Message) and (side is not None or not self._marks),
            side=side,
        )

    def abandon(self, name: str, *, is_retry: bool = False) -> None:
        """Gives up a step whose backward pass did not end.

        ``name`` is the parameter whose gradient showed that. A rank that is alone forgets the step.
        So do all ranks where this ``is_retry`` on each, if what messages keep can be put back: see
        `retry`. Else this raises ``LoopMistake``.
        """
        keeps = any(any(leaves(message.state)) for message in self.flat_messages)
        if self.engine.world > 1 and is_retry and (self.commit is not None or not keeps):
            from ..failure.retry import repeat_together  # a pass that raised is rare

            repeat_together(self.engine, self._step, self._num_compared + len(self._queue))
            for absent in self.names:
                self.ready(absent, None)
            self.close()
            self.engine.wait(self.all_ends())
            self._marks.follow()
            if self.commit is not None:
                self.commit.undo()
            self.open = False
            return
        if self.engine.world > 1:
            raise self.engine.give_up(
                f"the gradient of {name} came after an earlier backward pass that raised before "
                "its end, or twice in one, as the parameter is shared by segments of a reentrant "
                "activation checkpoint (use_reentrant=False is accepted). A pass that raised can "
                "be repeated, by all ranks, after zero_grad(set_to_none=True), where the exchange "
                "keeps no residuals, or attach was given on_failure='shrink'"
            )
        self.engine.begin(self._backward_over)
        self.engine.wait(self.all_ends())
        self._marks.follow()
        self.open = False

    @property
    def complete(self) -> bool:
        """Whether all gradients of the open step are handed in, and all messages launched."""
        launched = len(self._ends) == len(self.messages)
        return launched and len(self.grads) == len(self.names)

    def of(self, names: Collection[str]) -> list[AnyMessage]:
        """The messages that carry any of ``names``, in issue order."""
        return [self.messages[index] for index in self.ends_of(names)]

    def ends_of(self, names: Collection[str]) -> list[int]:
        """Indices of the messages that carry any of ``names``."""
        return sorted({m.index for name in names for m in self._messages_of[name]})

    def end(self, index: int) -> Task | None:
        """The end of a launched message, or None if it has not been launched."""
        return self._ends.get(index)

    def all_ends(self) -> list[Task]:
        """Ends of the messages launched so far, and of the news beside them."""
        return [*self._ends.values(), *self._news, *self._committing]

    @property
    def unused(self) -> set[str]:
        """The parameters that no rank used in the last step; the same on all ranks."""
        flags = zip(self.names, self._told_F.tolist(), strict=True)
        return {name for name, used in flags if not used}

    def arrived(self, name: str) -> bool:
        """Whether a parameter's mean of the last step is complete, or launched by a device."""
        return all(self._ends[message.index].done for message in self._messages_of[name])

    def wait(self, names: Sequence[str]) -> None:
        """Blocks until the means of ``names`` are there; the step's gradients are handed in.

        Where a device computes them it is the current stream that waits: see ``follow``.
        """
        self.engine.wait([self._ends[index] for index in self.ends_of(names)])
        self.follow(names)

    def follow(self, names: Sequence[str]) -> None:
        """Has the device's current stream wait for means that have ``arrived``."""
        if self._marks:
            self._marks.follow(self.ends_of(names))

    def is_sparse(self, name: str) -> bool:
        """Whether a parameter's module announces row-sparse gradients."""
        return not all(isinstance(message, Message) for message in self._messages_of[name])

    def is_cut(self, name: str) -> bool:
        """Whether ranges of a parameter's flat gradient travel apart."""
        return name in self._cut

    def numel(self, name: str) -> int:
        """Elements of a parameter."""
        return self._params[name].numel()

    def shape(self, name: str) -> torch.Size:
        """The shape in which a parameter travels."""
        return self._params[name].shape

    def mean(self, name: str) -> Tensor:
        """A new tensor with the mean of a parameter for which this rank handed in None."""
        param = self._params[name]
        mean = torch.empty(param.shape, dtype=param.dtype, device=param.device)
        for message in self._messages_of[name]:
            if not isinstance(message, Message):
                return message.mean.to(param.device)
            message.copy_mean(name, mean)
        return mean

    def close(self) -> None:
        """Starts the count of the ranks that used each parameter, once all gradients are handed in.

        The count travels while the last messages are on their way, if none of them carries it.
        """
        self._marks.close()
        self.engine.begin(self._backward_over)
        if self._told_F is self._used:
            self._write_flags(self._used)
            if self.engine.world > 1:
                text = _sum_flags(self._used)
                end = self.engine.launch(len(self.messages), "presence", text, is_news=True)
                self._news.append(end)
        if self.commit is not None and self.engine.world > 1:
            text, ends = (
                self.commit.text(self._step + 1, self.flat_messages, self.streams),
                self.all_ends(),
            )
            index = len(self.messages) + 2
            commit = self.engine.launch(index, "commit", text, behind=ends, is_news=True)
            self._committing = [commit]

    @property
    def is_whole(self) -> bool:
        """Whether all means of the open step are here, though other ranks may not have theirs."""
        return bool(self.open and self._committing) and all(
            end.done for end in (*self._ends.values(), *self._news)
        )

    def _write_flags(self, into_F: Tensor) -> None:
        """Writes 1 for each parameter that this rank used in the step, else 0."""
        used = [grad is not None for grad in self.grads.values()]
        if len(used) == len(self.names) and all(used):
            into_F.fill_(1)
        else:  # one without elements, which no message waits for, may not be handed in yet
            flags = [float(self.grads.get(name) is not None) for name in self.names]
            into_F.copy_(torch.tensor(flags, device="cpu"))

    def finish(self) -> set[str]:
        """Waits for all means; returns the names that handed in None but have a gradient now.

        A parameter that no rank used is not among them: its gradient stays None on every rank, as
        in plain training, and its residual waits for its next use.
        """
        self.engine.wait(self.all_ends())
        return self.settled()

    def settled(self) -> set[str]:
        """Closes a step whose means are all here; returns as ``finish``."""
        self._marks.follow()
        self.open = False
        if self.commit is not None:
            self.commit.settle()
        absent = [name for name, grad in self.grads.items() if grad is None]
        if not absent:
            return set()
        unused = self.unused
        for name in unused:
            for message in self._messages_of[name]:
                if isinstance(message, Message):
                    message.take_back(name)
        return {name for name in absent if name not in unused}


def _let_go(names: Sequence[str], grads: Grads, num_left: dict[str, int]) -> None:
    """Drops gradients whose messages have all ended."""
    for name in names:
        num_left[name] -= 1
        if not num_left[name] and grads[name] is not None:
            grads[name] = _LET_GO


def _sum_flags(flags: Tensor) -> Steps[None]:
    yield AllReduce(flags)
