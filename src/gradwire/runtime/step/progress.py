"""Progress: the steps of an attached model: it opens, ends, counts and times them."""

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.amp import GradScaler

from ...contract.spec import NamedParam
from ...contract.trace.span import Span
from ...errors import log
from ..engine.engine import Engine
from ..grid.dtensors import put_grad
from ..transport.task_graph import wall_clock
from .figures import Log, Recorder, density_of_step, outgrown
from .messages import Message
from .scaling import held_by_optimizers, scale_of
from .synchroniser import Synchroniser

if TYPE_CHECKING:
    from .guard import Guard

_FIRST_LOOK = 64
"""The steps after which residuals are compared with gradients for the first time."""


class Progress:
    """The steps of one attached model on this rank.

    ``step`` is the number of exchanged backward passes so far. Hooks call
    ``begin_step`` at the first gradient of a backward pass and ``record_backward`` at
    its end. Then the hooks of a plain module call ``finish``, which puts means into the
    gradients of ``params``. Other hooks call ``end_step`` once all means are there.
    """

    def __init__(
        self,
        synchroniser: Synchroniser,
        recorder: Recorder,
        params: Sequence[NamedParam],
        scaler: GradScaler | None = None,
    ) -> None:
        self.guard: Guard | None = None
        self.logs: list[Log] = []
        self.synchroniser = synchroniser
        self.recorder = recorder
        self.params = dict(params)
        """The exchanged parameters, by name."""
        self._scaler = scaler
        synchroniser.undoes_skipped = self.knows_scaler
        self._names = {id(param): name for name, param in params}
        self._held: set[str] | None = None
        """The parameters that optimizers of this rank hold; None until it is asked."""
        self.on_decided: Callable[[], None] = lambda: None
        """Called between two passes, once it is known whether an optimizer stepped."""
        self._in_step: list[Message] = []
        """The messages of the open step."""
        self.num_fragments = 1
        """The number of steps in which every parameter is exchanged once."""
        self.backward: Callable[[], object] = lambda: None
        """A weak reference to the callback that ends the backward pass under way.

        It returns None once the pass is over.
        """
        self.opening = threading.RLock()  # autograd has a thread for each device
        """Held while a step is opened, and while ``detach`` sets ``is_leaving``."""
        self.is_leaving = False
        """Whether no further step may open, as ``detach`` waits for the present one."""
        self.step = 0
        self._num_backward = 0
        self._forward_end_s = 0.0
        self._warned = False

    def compare(self, every: int) -> None:
        """Compares means with dense means every ``every`` steps, from now on.

        If they are compared already, this changes nothing.
        """
        from .guard import Guard

        self.guard = self.guard or Guard(every)

    def ending(self, end: Callable[[], None]) -> Callable[[], None]:
        """A callback that calls ``end``; ``backward`` refers to it until it returns.

        If a pass raises before its end, autograd drops the callback, and the weak
        reference dies. If ``end`` itself raises, its frames keep the callback alive. So
        the reference is then replaced.
        """

        def ended() -> None:
            try:
                end()
            finally:
                if self.backward is weak[0]:
                    self.backward = lambda: None

        self.backward = weakref.ref(ended)
        # a reference to itself would keep the callback alive
        weak = [self.backward]
        return ended

    def queue_end(
        self,
        end: Callable[[], None],
        before: Callable[[], None] | None = None,
        *,
        behind_others: bool = False,
    ) -> None:
        """Has autograd call ``end`` as this backward pass ends, still in backward().

        Autograd drops the callback if the pass raises; the next pass notices that. With
        ``behind_others`` it is called after callbacks that are queued at the end of the
        pass, as FSDP's are. ``before`` is called for every attached model before any of
        them waits, as ranks may reach models in different orders. DDP needs no
        ``before``, as it hands in all gradients itself.
        """
        queue = torch.autograd.Variable._execution_engine.queue_callback
        ended = self.ending(end)

        def handed_in() -> None:
            assert before is not None
            try:
                before()
            except BaseException:
                self.backward = lambda: None
                raise
            queue(ended)

        first = ended if before is None else handed_in
        queue((lambda: queue(first)) if behind_others else first)

    @property
    def _engine(self) -> Engine:
        return self.synchroniser.engine

    @property
    def messages(self) -> list[Message]:
        """All messages, in issue order."""
        return self.synchroniser.messages

    def go_on_from(self, step: int) -> None:
        """Counts on from ``step``, at which a loaded state was saved."""
        self.step = self._num_backward = step

    def begin_step(self, names: Collection[str] | None = None) -> None:
        """Opens a step at the first gradient of a backward pass.

        ``names`` are the parameters that take part; None stands for all.
        """
        self._in_step = self.messages if names is None else self.synchroniser.of(names)
        notes_norms = (self._looks() and not self._warned) or bool(self._due())
        for message in self._in_step:
            message.notes_norms = notes_norms
        if self.guard is not None and self._engine.world > 1:
            self.guard.begin(self.step, self._in_step)
        own_step = self.step // self.num_fragments
        self.synchroniser.begin(
            self.step, scale_of(self._scaler), names, own_step=own_step
        )

    def begin_without_messages(self) -> None:
        """Notes that no message of gradwire's is in the step that begins."""
        self._in_step = []

    def _looks(self) -> bool:
        """Whether residuals are compared with gradients at the end of this step.

        This is so after 64, 128, 256 steps and so on. Before 64 steps residuals may
        still be filling up. Such rare looks cost next to nothing.
        """
        num_steps = self.step // self.num_fragments + 1
        return num_steps >= _FIRST_LOOK and num_steps.bit_count() == 1

    def _due(self) -> list[Log]:
        """The logs that get a row at the end of this step."""
        return [log for log in self.logs if log.is_due(self.step)]

    def record_forward(self, start_s: float, end_s: float) -> None:
        """Notes a forward pass, which may end before the last backward's step does."""
        self._note("forward", start_s, end_s, self._num_backward)
        self._forward_end_s = end_s

    def record_backward(self, end_s: float) -> None:
        """Notes the end of a backward pass, which began when the forward pass ended."""
        if self._forward_end_s:
            self._note("backward", self._forward_end_s, end_s, self.step)
        self._num_backward += 1

    def record_wait(self, start_s: float, end_s: float) -> None:
        """Notes a wait of the training loop for the network."""
        self._note("wait", start_s, end_s, self.step)

    def _note(self, lane: str, start_s: float, end_s: float, step: int) -> None:
        self.recorder.add(
            Span(self._engine.rank, lane, lane, start_s, end_s, step=step)
        )

    def end_step(self, sent_bytes: int | None = None) -> None:
        """Closes a step whose means have all arrived.

        If DDP's own reducer has averaged, ``sent_bytes`` are the bytes that it sent.
        """
        costs = dict(self.recorder.costs(self.step))
        now_s = wall_clock()
        if sent_bytes is not None:
            costs["wire_bytes"] = sent_bytes
        density = density_of_step(
            self._in_step,
            rank=self._engine.rank,
            step=self.step,
            end_s=now_s,
            sent_bytes=int(costs["wire_bytes"]),
        )
        self.recorder.end_step(costs, now_s, density)
        choosers = {one.chooser for one in self._in_step if one.chooser is not None}
        for chooser in choosers:
            chooser.choose_together(
                [one.state for one in self._in_step if one.chooser == chooser]
            )
        self.synchroniser.end_step()
        if self.guard is not None:
            self.guard.end(self.step, self._in_step, self._engine.rank)
        looks = self._looks()
        logs = self._due()
        self.step += 1
        self._num_backward = max(self._num_backward, self.step)
        if looks or (logs and self.step >= _FIRST_LOOK):
            self._warn_of_residuals()
        self.write(self.step)

    def write(self, step: int) -> None:
        """Writes rows into the logs where one is due; a log that fails ends."""
        ended = [log for log in self.logs if not log.goes_on(step, self._in_step)]
        self.logs = [log for log in self.logs if log not in ended]

    def _warn_of_residuals(self) -> None:
        """Warns once of residuals that are much larger than their gradients."""
        found = [] if self._warned else outgrown(self._in_step)
        if not found:
            return
        self._warned = True
        name, factor = found[0]
        log.warning(
            "after %d steps the residual of %s has %.0f times the norm of its "
            "gradient (%d tensors are like it): what is kept does not get "
            "through, and training may stand still; take a smaller block, more "
            "bits or a higher density, or exclude the tensor by compress_if",
            self.step,
            name,
            factor,
            len(found),
        )

    @property
    def knows_scaler(self) -> bool:
        """Whether ``attach`` was given a loss scaler that is enabled."""
        return self._scaler is not None and self._scaler.is_enabled()

    def decide(self, params: Sequence[Tensor], *, is_skipped: bool) -> None:
        """Notes whether the scaler skipped the step of an optimizer with ``params``.

        See `scaling`.
        """
        names = {self._names[id(param)] for param in params if id(param) in self._names}
        if names and self._is_between_passes():
            self.synchroniser.decide(names, is_skipped=is_skipped)
            self.on_decided()

    def end_iteration(self, *, is_by_hand: bool) -> None:
        """Decides by the means about parameters without a scaler; see `scaling`.

        If the loop steps ``by_hand``, these are all parameters, else those that no
        optimizer holds.
        """
        names = set(self.params) if is_by_hand else self._unheld()
        if names and self._is_between_passes():
            self.synchroniser.decide_by_means(names)
            self.on_decided()

    def _unheld(self) -> set[str]:
        """The parameters that no optimizer of this rank holds, as far as can be seen.

        An optimizer may take its first step later than others, so all optimizers are
        looked at.
        """
        unknown = set(self.params).difference(*self.synchroniser.known)
        if unknown and self._held is None:
            ids = held_by_optimizers()
            self._held = {
                name for name, param in self.params.items() if id(param) in ids
            }
        return unknown.difference(self._held or ())

    def _is_between_passes(self) -> bool:
        """Ends a step whose exchange overlaps; returns whether no step is open."""
        if self.synchroniser.open and self.synchroniser.complete:
            self.finish()
        return not self.synchroniser.open

    def wait(self, names: Sequence[str]) -> None:
        """Blocks until the means of ``names`` are there; raises ``RankFailed``."""
        start_s = wall_clock()
        self.synchroniser.wait(names)
        self.record_wait(start_s, wall_clock())

    def finish(self) -> None:
        """Waits for the whole step, and puts means into ``.grad``."""
        if self.synchroniser.open:
            start_s = wall_clock()
            self._put(self.synchroniser.finish(), start_s)

    def put_means(self) -> None:
        """Ends a step whose means are all here, though its engine has failed."""
        self._put(self.synchroniser.settled(), wall_clock())

    def _put(self, arrived: set[str], start_s: float) -> None:
        synchroniser = self.synchroniser
        for name in arrived:
            put_grad(self.params[name], synchroniser.mean(name))
        self.record_wait(start_s, wall_clock())
        self.end_step()

    def give_up(self, text: str) -> BaseException:
        """Ends the run for a mistake of this rank's loop; see `Engine.give_up`.

        The step of the error is the next one to end.
        """
        return self._engine.give_up(text, step=self.step)
