"""Shrink: ranks go on without the lost ranks, under an unchanged training loop.

When a rank is lost, the others agree on the next epoch (the ranks that go on) and on
the steps that count (`decided`). They undo a step that does not count (`backup`),
connect anew, and go on with fewer ranks. Every survivor's backward pass raises
``RanksLost`` in the same step, the first that does not count. The loop repeats that
step. A mean over fewer ranks has a larger part of each rank's residual. So residuals
are multiplied by the new number of ranks over the old number. The lost ranks' residuals
are lost with them.

An entry of ``stats()["left"]`` has the ``ranks`` by their numbers in the job, and the
``step`` that was repeated. It also has ``residual_norms`` as the ranks last announced
them, ``norms_after_steps``, and the ``seconds`` from the notice to going on. An entry
of ``stats()["joined"]`` has a newcomer's ``rank``, the ``step`` that it began with, and
the ``seconds`` that it took.

Survivors meet in the job's store, as the connections among them are broken (`epochs`).
Each announces its counts of steps, and all decide by the counts of the ranks that take
part.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

from ...errors import (
    GradwireError,
    InvalidSetting,
    LoopMistake,
    RankFailed,
    RanksLost,
    log,
)
from ..engine.engine import Engine
from ..engine.plain import send
from ..liveness.alarm import Alarm, listed, said
from ..liveness.membership import Membership, Run
from ..state import checkpoint
from ..state.table import is_by_element, is_residual
from ..step.messages import Message
from ..step.progress import Progress
from ..step.report import StepReport
from ..transport.wire import Group, has_store
from .going_on import survivors_of
from .rejoin import Healing, Lookout, Newcomer, Offer, come_together


class Counted(NamedTuple):
    """A rank's steps: those that it has ended, and those of which it has all means.

    ``most`` counts the open step, if all of its means are here; ``least`` does not.
    ``is_open`` says whether the rank is in a step.
    """

    least: int
    most: int
    is_open: bool = False


class AgreedSteps(NamedTuple):
    """The number of steps that count on all ranks that go on."""

    num_steps: int
    is_torn: bool = False
    """Whether a rank is in a step that does not count."""


def decided(
    counted: Collection[Counted], *, repeats: bool = False
) -> AgreedSteps | None:
    """The decision by all survivors' counts, the same on each of them.

    A step counts if every survivor has all of its means. If the loop ``repeats`` the
    step anyway, for another model, it counts only if a rank has ended it. Ranks confirm
    each step (`synchroniser`), so no rank has ended a step whose means another rank
    lacks. If one has, memory or a program is damaged. Then there is no decision, and
    this returns None.

    >>> decided([Counted(7, 7), Counted(6, 7)])
    AgreedSteps(num_steps=7, is_torn=False)
    >>> decided([Counted(6, 7), Counted(6, 6)]).num_steps
    6
    >>> decided([Counted(6, 7), Counted(6, 7)], repeats=True).num_steps
    6
    """
    ended = max(count.least for count in counted)
    whole = min(count.most for count in counted)
    if ended > whole:
        return None
    agreed = ended if repeats else whole
    is_torn = any(count.is_open and count.least == agreed for count in counted)
    return AgreedSteps(agreed, is_torn)


_shrinking: WeakSet[Shrinking] = WeakSet()
"""The attached models of this process that go on without lost ranks."""


class Shrinking:
    """The survival of one attached model.

    ``engine_of`` connects other ranks, and ``make_messages`` makes the model's messages
    for them. ``run`` notes who left and who joined, by the ranks' numbers in the job.
    The engine ends with ``handle``.
    """

    def __init__(
        self,
        handle: object,
        run: Run,
        progress: Progress,
        engine_of: Callable[[Membership], Engine],
        make_messages: Callable[[Membership], Sequence[Message]],
        undo: ExitStack,
        healing: Healing,
        newcomer: Newcomer | None,
    ) -> None:
        self._handle = weakref.ref(handle)
        self._run = run
        self._progress = progress
        self._connect = engine_of
        self._make_messages = make_messages
        self._undo = undo
        engine = self._engine
        self._name = engine.who.name
        self._last_newcomer = 0
        self._num_labels = (
            dist.get_world_size() if dist.is_initialized() else engine.world
        )
        self.on_drop: Callable[[], None] = lambda: None
        """Called where a step's gradients are dropped."""
        self.finish = progress.finish
        """Waits for the means of the open step, and ends it."""
        self._due: RanksLost | None = None
        """The loss that is still to be raised in the loop."""
        self._undoes = False
        """Whether a step of this model was undone when a rank was lost."""
        self._is_torn = False
        """Whether a rank was in a step that did not count."""
        self._look_after(engine)
        self._report.confirms = True
        self._healing = healing
        if newcomer is not None:
            self._last_newcomer = newcomer.offer.number
            progress.go_on_from(newcomer.offer.step)
            self._note_newcomer(newcomer.offer, newcomer.seconds)
        self._lookout: Lookout | None = None
        self._means: list[Tensor | None] = []
        _shrinking.add(self)
        undo.callback(_shrinking.discard, self)

    @property
    def _engine(self) -> Engine:
        return self._progress.synchroniser.engine

    @property
    def _report(self) -> StepReport:
        return self._progress.synchroniser.report

    def before_step(self) -> None:
        """Raises a loss that the last step did not raise; admits a newcomer.

        The last step did not raise if it counted, or if another model had the loss.
        """
        if self._due is not None:
            self._raise_due(None)
        self._look_out()
        newcomer = self._report.newcomer
        if newcomer not in (0, self._last_newcomer):
            self._last_newcomer = newcomer
            numbers = self._engine.who.numbers
            self._admit(
                Offer(newcomer, [*numbers, self._num_labels], self._progress.step)
            )

    def _raise_due(self, cause: RankFailed | None) -> None:
        """Raises the loss once for all models, which share the steps of the loop."""
        due = self._due
        for model in _shrinking:
            model._due = None
        assert due is not None, "a model that has lost a rank says so"
        self._drop_gradients()
        raise due from cause

    def _drop_gradients(self) -> None:
        for param in self._progress.params.values():
            param.grad = None
        self.on_drop()

    def failed(self, failure: RankFailed) -> None:
        """Goes on without the lost ranks, or raises ``failure`` where it cannot.

        Raises ``RanksLost`` if the step does not count. If it counts, it is ended, and
        the next step raises. All models that have lost a rank go on now. Else one rank
        might do so in a step of this model, and another rank in a step of the next.
        """
        if isinstance(failure, RanksLost | LoopMistake) or not failure.ranks:
            raise failure
        self._go_on_together(failure)
        # another model's loss has only interrupted the wait
        if self._progress.synchroniser.open:
            try:
                self.finish()
            except RankFailed as later:
                self.failed(later)

    def _go_on_together(self, failure: RankFailed) -> None:
        """Goes on in all models that ``failure`` concerns.

        Raises where a step is to be repeated. Models that have lost a rank come first.
        If a step of theirs does not count, it is repeated, and with it the steps of all
        other models: the loop makes them together.
        """
        num_steps = self._progress.step
        if len(_shrinking) > 1:
            # A dropped model that is not collected yet would count on this rank alone.
            gc.collect()
        # in one order on all ranks
        every = sorted(_shrinking, key=lambda model: model._name)
        for model in every:
            model._engine.interrupt(None)
        models = [
            model for model in every if model._engine.everyone.in_group(failure.ranks)
        ]
        _all_lose(models, failure)
        is_torn = any(model._is_torn for model in models)
        beside = [
            other
            for other in every
            if other not in models
            and other._engine.world > 1
            and (is_torn or other._engine.failure)
        ]
        _all_lose(beside, failure)
        changed = [*models, *beside]
        undone = [model for model in changed if model._undoes]
        if undone or (self in changed and self._progress.step == num_steps):
            due = next(
                model for model in (self, *undone, *models) if model._due is not None
            )
            due._raise_due(failure)
        for model in beside:
            model._due = None

    def _break_off(self, failure: RankFailed) -> None:
        """Alarms this model's other ranks, as they may wait for a rank that left."""
        engine = self._engine
        who = engine.everyone
        lost = who.in_group(failure.ranks)
        beyond = tuple(rank for rank in failure.ranks if rank not in who.numbers)
        text = (
            f"rank {listed(failure.ranks)} of the job was lost in a step of another "
            "model"
        )
        alarm = Alarm(lost, self._progress.step, text, failure.exit_code, beyond)
        engine.break_off(alarm, "by that model", in_step=True)

    def _look_after(self, engine: Engine) -> None:
        """Makes a failure of this model end this rank's waits in other models, too.

        The engine's threads must not keep the model alive, to which this object leads.
        """
        this = weakref.ref(self)

        def announce(error: BaseException) -> None:
            if isinstance(error, RankFailed) and error.ranks:
                for model in [*_shrinking]:
                    if this() not in (model, None):
                        model._engine.interrupt(error)

        engine.on_failure = announce
        engine.survive()

    def _lose(self, failure: RankFailed) -> None:
        """Goes on without lost ranks; notes whether a step is undone here or elsewhere.

        A model that has lost no rank goes on among the same ranks, if the step is to be
        repeated.
        """
        old = self._engine
        progress = self._progress
        synchroniser = progress.synchroniser
        start_s = time.monotonic()
        num_steps = progress.step
        is_open = synchroniser.open
        own = Counted(num_steps, num_steps + synchroniser.is_whole, is_open)
        left = survivors_of(old, failure, self._connect, own, self._run.group)
        self._undo.callback(left.engine.close)
        decision = decided(
            [Counted(*value) for value in left.values],
            repeats=not old.everyone.in_group(failure.ranks),
        )
        if decision is None:
            raise failure
        is_counted = decision.num_steps > num_steps
        if is_counted:
            progress.put_means()
        # nobody writes into gradients or state now; what waits for peers is abandoned
        synchroniser.streams.catch_up()
        self._undoes = is_open and not is_counted
        if self._undoes:
            synchroniser.undo()
            self._drop_gradients()  # some may be means of the step that does not count
        self._is_torn = decision.is_torn
        staying = left.engine.everyone.numbers
        gone = [n for n in old.everyone.numbers if n not in staying]
        self._due = self._note(old, gone, decision.num_steps, failure)
        try:
            self._move(left.engine, left.group, is_residual)
        except GradwireError as error:
            text = f"{failure}; the others cannot go on: {said(error)}"
            raise RankFailed(text, ranks=failure.ranks, step=failure.step) from error
        log.warning("%s", self._due)
        if gone:
            self._run.left[-1]["seconds"] = time.monotonic() - start_s

    def _note(
        self, old: Engine, gone: Sequence[int], step: int, failure: RankFailed
    ) -> RanksLost:
        """Notes which ranks of the job left; returns the error that says so."""
        if not gone:
            return RanksLost(
                f"rank {listed(failure.ranks)} is lost, in another model; "
                "repeat the step, from zero_grad() on",
                ranks=failure.ranks,
                step=step,
            )
        ranks = tuple(gone)
        records = [self._report.records[rank] for rank in old.who.in_group(gone)]
        self._run.left.append(
            {
                "ranks": ranks,
                "step": step,
                "residual_norms": tuple(record.norm for record in records),
                "norms_after_steps": tuple(record.num_steps for record in records),
            }
        )
        norms = ", ".join(
            f"{record.norm:.3g} after {record.num_steps} steps" for record in records
        )
        return RanksLost(
            f"rank {listed(ranks)} is lost in step {step}, "
            f"with residuals whose norm was {norms}; {old.everyone.world - len(gone)} "
            "ranks go on: repeat the step, from zero_grad() on",
            ranks=ranks,
            step=step,
        )

    def _move(
        self, engine: Engine, group: Group | None, which: Callable[[str], bool]
    ) -> None:
        """Goes on among the ranks of ``engine``, with the state of the exchanges.

        ``which`` says, by name, which fields of the state are multiplied by the new
        number of ranks over the old number.
        """
        progress = self._progress
        saved = checkpoint.collect(progress.messages)
        begun = checkpoint.begun_step(progress.messages)
        for state in (saved, begun.saved):
            checkpoint.scale(state, engine.world / self._engine.world, which)
        messages = self._make_messages(engine.who)
        checkpoint.move(saved, messages, begun)
        progress.synchroniser.go_on(engine, messages)
        self._look_after(engine)
        self._run.go_on(engine.who, group)
        if (handle := self._handle()) is not None:
            weakref.finalize(handle, engine.finish_and_close)

    def _look_out(self) -> None:
        """Makes rank 0 look for newcomers in the store, if any, once for all models."""
        is_due = self._engine.rank == 0 and has_store()
        if is_due and not any(model._lookout for model in _shrinking):
            lookout = Lookout(self._healing.fingerprint)
            self._lookout = lookout
            self._undo.callback(lookout.close)
            weakref.finalize(self._handle(), lookout.close)
            self._report.look = partial(self._seen, lookout)

    def _seen(self, lookout: Lookout) -> int:
        """The number of the newcomer that waits; notes the means of this step."""
        number = lookout.number
        params = self._progress.params.values() if number else ()
        self._means = [param.grad for param in params]
        return number

    def _admit(self, offer: Offer) -> None:
        """Takes a newcomer in if all ranks agree, else goes on as before."""
        start_s = time.monotonic()
        old = self._engine
        synchroniser = self._progress.synchroniser
        synchroniser.streams.catch_up()
        admitted = come_together(offer, self._connect, self._heal, old.timeout, old)
        if isinstance(admitted, str):
            log.warning(
                "a new process could not join at step %d: %s", offer.step, admitted
            )
            return
        engine, group, _ = admitted
        old.close()
        self._undo.callback(engine.close)
        self._move(engine, group, is_by_element)
        synchroniser.forget_steps()  # of gradients that the loop has dropped
        self._note_newcomer(offer, time.monotonic() - start_s)

    def _note_newcomer(self, offer: Offer, seconds: float) -> None:
        self._num_labels = offer.labels[-1] + 1
        self._run.joined.append(
            {"rank": offer.labels[-1], "step": offer.step, "seconds": seconds}
        )
        log.warning("rank %d has joined at step %d", offer.labels[-1], offer.step)

    def _heal(self, engine: Engine) -> None:
        """Has rank 0 send the newcomer the state that it lacks.

        If no newcomer can come in now, this raises, and all ranks go on without it.
        """
        if engine.rank:
            return
        if len(_shrinking) > 1:
            raise InvalidSetting(
                "several models are attached, and a newcomer can join only one"
            )
        pairs = zip(self._progress.params.values(), self._means, strict=False)
        if any(
            param.grad is mean is not None and mean.count_nonzero()
            for param, mean in pairs
        ):
            raise InvalidSetting(
                "exchanged gradients add up, of which it lacks the first; write "
                "no_sync() there"
            )
        data = self._healing.packed(self._progress.messages)
        send(data, engine.world - 1, engine.routes.first_channel)


def _all_lose(models: Sequence[Shrinking], failure: RankFailed) -> None:
    """Goes on in models; raises an alarm on all of them before it waits for any."""
    for model in models:
        model._break_off(failure)
    for model in models:
        model._lose(failure)
