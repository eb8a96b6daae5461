"""Shrink: ranks go on without the lost ranks, under an unchanged training loop.

When a rank is lost, the others agree on the next epoch and on the steps that count
(`decided`), and undo a step that does not (`backup`). They connect anew and go on in a
smaller world. Every survivor's backward pass raises ``RanksLost`` in the same step, the
first that does not count, and the loop repeats that step. A mean over fewer ranks
delivers more of each residual. So residuals are scaled by the new number of ranks over
the old one. The lost ranks' residuals are lost with them.

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
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

from ...errors import GradwireError, InvalidSetting, LoopMistake, RankFailed, RanksLost
from ..engine.engine import Engine
from ..engine.plain import send
from ..liveness.alarm import Alarm, listed, said
from ..liveness.membership import ALONE, Membership, Run
from ..state import checkpoint
from ..state.table import is_residual
from ..step.messages import Message
from ..step.progress import Progress
from ..step.report import StepReport
from ..transport.wire import Group, has_store
from .groups import open_group, register_group
from .rejoin import Healing, Lookout, Newcomer, Offer, come_together


class Counted(NamedTuple):
    """The number of steps that a rank has ended for certain, the most that it can
    count, and whether it is in a step.
    """

    least: int
    most: int
    is_open: bool = False


class Survivors(NamedTuple):
    """The ranks that go on, ascending, and the number of steps counted on all."""

    ranks: tuple[int, ...]
    num_steps: int
    is_torn: bool = False
    """Whether a rank is in a step that does not count."""


def decided(
    counted: Mapping[int, Counted], *, repeats: bool = False
) -> Survivors | None:
    """The decision by all survivors' counts, the same on each of them.

    A step counts if every survivor has it. If the loop ``repeats`` the step anyway, for
    another model, it counts only if a rank has ended it. Ranks confirm each step
    (`synchroniser`), so no rank has ended a step that another lacks. If one has, memory
    or a program is damaged: there is no decision, and this returns None.

    >>> decided({0: Counted(7, 7), 2: Counted(6, 7)})
    Survivors(ranks=(0, 2), num_steps=7, is_torn=False)
    >>> decided({0: Counted(6, 7), 2: Counted(6, 6)}).num_steps
    6
    >>> decided({0: Counted(6, 7), 2: Counted(6, 7)}, repeats=True).num_steps
    6
    """
    ended = max(count.least for count in counted.values())
    whole = min(count.most for count in counted.values())
    if ended > whole:
        return None
    agreed = ended if repeats else whole
    is_torn = any(count.is_open and count.least == agreed for count in counted.values())
    return Survivors(tuple(sorted(counted)), agreed, is_torn)


_log = logging.getLogger("gradwire")
_shrinking: WeakSet[Shrinking] = WeakSet()
"""The attached models of this process that go on without lost ranks."""


class Shrinking:
    """The survival of one attached model.

    ``engine_of`` connects other ranks, and ``make_messages`` makes the model's messages
    for them. ``run``  notes who left
    and who joined, by the ranks' numbers in the job. The engine ends with ``handle``.
    """

    def __init__(
        self,
        handle: object,
        run: Run,
        progress: Progress,
        engine_of: Callable[[Membership], Engine],
        make_messages: Callable[[Membership], Sequence[Message]],
        undo: ExitStack,
        healing: Healing | None,
        newcomer: Newcomer | None,
    ) -> None:
        self._handle = weakref.ref(handle)
        self._run = run
        self._progress = progress
        self._params = [*progress.params.items()]
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
        self._due: RanksLost | None = None
        """The loss that the loop has yet to be raised."""
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
    def _numbers(self) -> tuple[int, ...]:
        """The numbers in the job of the ranks that go on."""
        return self._engine.who.numbers

    @property
    def _report(self) -> StepReport:
        return self._progress.synchroniser.report

    def before_step(self) -> None:
        """Raises a loss that the last step did not raise.

        That step counted, or another model had the loss.
        """
        if self._due is not None:
            self._raise_due(None)
        self._look_out()
        newcomer = self._report.newcomer
        if newcomer not in (0, self._last_newcomer):
            self._last_newcomer = newcomer
            self._admit(
                Offer(newcomer, [*self._numbers, self._num_labels], self._progress.step)
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
        for _, param in self._params:
            param.grad = None
        self.on_drop()

    def failed(self, failure: RankFailed) -> None:
        """Goes on without the lost ranks, or raises ``failure`` where it cannot.

        Raises ``RanksLost`` if the step does not count. If it counts, it is ended, and
        the next step raises. All models that have lost a rank go on now, as one rank
        may be in a step of this model, and another rank in a step of the next model.
        """
        lost = {*failure.ranks}
        who = self._engine.who
        is_final = isinstance(failure, RanksLost | LoopMistake)
        if is_final or not lost or lost.issuperset(who.in_job([who.rank])):
            raise failure
        self._go_on_together(failure)
        # another model's loss has only interrupted the wait
        if self._progress.synchroniser.open:
            try:
                self._progress.finish()
            except RankFailed as later:
                self.failed(later)

    def _go_on_together(self, failure: RankFailed) -> None:
        """Goes on in all models that ``failure`` concerns.

        Raises where a step is to be repeated. Models that have lost a rank come first.
        If a step of theirs does not count, it is repeated, and with it the steps of all
        other models: the loop makes them together.
        """
        num_steps = self._progress.step
        lost = {*failure.ranks}
        if len(_shrinking) > 1:
            # else a dropped model still counts on ranks that have not collected it yet
            gc.collect()
        # in one order on all ranks
        every = sorted(_shrinking, key=lambda model: model._name)
        for model in every:
            model._engine.interrupt(None)
        models = [model for model in every if lost.intersection(model._numbers)]
        _all_lose(models, failure)
        is_torn = any(model._is_torn for model in models)
        others = [
            other for other in every if other not in models and other._engine.world > 1
        ]
        beside = [other for other in others if is_torn or other._engine.has_failed]
        _all_lose(beside, failure)
        undone = [model for model in (*models, *beside) if model._undoes]
        stands = self._progress.step == num_steps and self in (*models, *beside)
        if undone or stands:
            due = next(
                model for model in (self, *undone, *models) if model._due is not None
            )
            due._raise_due(failure)
        for model in beside:
            model._due = None

    def _break_off(self, failure: RankFailed) -> None:
        """Alarms this model's other ranks, as they may wait for a rank that left."""
        engine = self._engine
        lost = engine.who.in_group(failure.ranks)
        numbers = {*engine.who.in_job(lost)}
        beyond = tuple(rank for rank in failure.ranks if rank not in numbers)
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

        A model that has lost none goes on among the same ranks, for a step that is
        repeated.
        """
        engine = self._engine
        synchroniser = self._progress.synchroniser
        start_s = time.monotonic()
        num_steps = self._progress.step
        is_open = synchroniser.open
        counted = Counted(num_steps, num_steps + synchroniser.is_whole, is_open)
        has_lost = not {*failure.ranks}.isdisjoint(self._numbers)
        decision = None
        if epoch := engine.next_epoch(counted, engine.who.in_group(failure.ranks)):
            counts = {rank: Counted(*value) for rank, value in epoch.values.items()}
            decision = decided(counts, repeats=not has_lost)
        if decision is None:
            raise failure
        is_counted = decision.num_steps > num_steps
        if is_counted:
            self._progress.put_means()
        self._due = self._note(engine, decision, failure)
        self._is_torn = decision.is_torn
        self._undoes = is_open and not is_counted
        self._go_on(failure, decision, undoes=self._undoes)
        _log.warning("%s", self._due)
        if len(decision.ranks) < engine.world:
            self._run.left[-1]["seconds"] = time.monotonic() - start_s

    def _note(
        self, engine: Engine, decision: Survivors, failure: RankFailed
    ) -> RanksLost:
        """Notes who left; returns the error that says so."""
        records = self._report.records
        gone = {*range(engine.world)} - {*decision.ranks}
        if not gone:
            return RanksLost(
                f"rank {listed(failure.ranks)} is lost, in another model; "
                "repeat the step, from zero_grad() on",
                ranks=failure.ranks,
                step=decision.num_steps,
            )
        announced = {self._numbers[r]: records[r] for r in sorted(gone)}
        self._run.left.append(
            {
                "ranks": tuple(announced),
                "step": decision.num_steps,
                "residual_norms": tuple(figures.norm for figures in announced.values()),
                "norms_after_steps": tuple(
                    figures.num_steps for figures in announced.values()
                ),
            }
        )
        norms = ", ".join(
            f"{figures.norm:.3g} after {figures.num_steps} steps"
            for figures in announced.values()
        )
        return RanksLost(
            f"rank {listed(announced)} is lost in step {decision.num_steps}, "
            f"with residuals whose norm was {norms}; {len(decision.ranks)} ranks go "
            "on: repeat the step, from zero_grad() on",
            ranks=tuple(announced),
            step=decision.num_steps,
        )

    def _go_on(self, failure: RankFailed, decision: Survivors, *, undoes: bool) -> None:
        """Connects the survivors and moves the state of exchanges over."""
        old = self._engine
        synchroniser = self._progress.synchroniser
        # nobody writes into gradients or state now; what waits for peers is abandoned
        old.close()
        synchroniser.streams.catch_up()
        if undoes:
            synchroniser.undo()
            self._drop_gradients()  # some may be means of the step that does not count
        saved = checkpoint.collect(self._progress.messages)
        begun = checkpoint.begun_step(self._progress.messages)
        for state in (saved, begun.saved):
            checkpoint.scale(state, len(decision.ranks) / old.world, is_residual)
        try:
            engine, group = self._connected(old, decision)
            self._move(saved, engine, group, begun)
        except (GradwireError, RuntimeError, TimeoutError) as error:
            text = f"{failure}; the others cannot go on: {said(error)}"
            raise RankFailed(text, ranks=failure.ranks, step=failure.step) from error

    def _move(
        self,
        saved: Mapping[str, Any],
        engine: Engine,
        group: Group | None,
        begun: checkpoint.BegunStep | None = None,
    ) -> None:
        """Goes on among the ranks of ``engine``, from the state that was collected."""
        messages = self._make_messages(engine.who)
        checkpoint.move(saved, messages, begun)
        self._progress.synchroniser.go_on(engine, messages)
        self._look_after(engine)
        self._run.go_on(engine.who, group)
        if (handle := self._handle()) is not None:
            weakref.finalize(handle, engine.finish_and_close)

    def _look_out(self) -> None:
        """Makes rank 0 look for newcomers in the store, if any, once for all models."""
        healing = self._healing
        if self._engine.rank or healing is None:
            return
        if has_store() and not any(model._lookout for model in _shrinking):
            self._lookout = Lookout(healing.fingerprint)
            self._undo.callback(self._lookout.close)
            weakref.finalize(self._handle(), self._lookout.close)
        self._report.look = self._seen

    def _seen(self) -> int:
        """The number of the newcomer that waits; notes the means of this step."""
        number = 0 if self._lookout is None else self._lookout.number
        self._means = [param.grad for _, param in self._params] if number else []
        return number

    def _admit(self, offer: Offer) -> None:
        """Takes a newcomer in where all ranks agree, else goes on as before."""
        start_s = time.monotonic()
        old = self._engine
        synchroniser = self._progress.synchroniser
        synchroniser.streams.catch_up()
        heal = self._healer(offer) if old.rank == 0 else lambda engine: None
        admitted = come_together(offer, self._connect, heal, old.timeout, old)
        if isinstance(admitted, str):
            _log.warning(
                "a new process could not join at step %d: %s", offer.step, admitted
            )
            return
        engine, group, _ = admitted
        old.close()
        self._undo.callback(engine.close)
        saved = checkpoint.collect(self._progress.messages)
        checkpoint.scale(saved, engine.world / old.world)
        self._move(saved, engine, group)
        synchroniser.forget_steps()  # of gradients that the loop has dropped
        self._note_newcomer(offer, time.monotonic() - start_s)

    def _note_newcomer(self, offer: Offer, seconds: float) -> None:
        self._num_labels = offer.labels[-1] + 1
        self._run.joined.append(
            {"rank": offer.labels[-1], "step": offer.step, "seconds": seconds}
        )
        _log.warning("rank %d has joined at step %d", offer.labels[-1], offer.step)

    def _healer(self, offer: Offer) -> Callable[[Engine], None]:
        """A function that sends the newcomer the state that it lacks.

        It raises if no newcomer can come in now.
        """
        healing = self._healing
        why = ""
        assert healing is not None
        pairs = zip(self._params, self._means, strict=False)
        if any(
            param.grad is mean is not None and mean.count_nonzero()
            for (_, param), mean in pairs
        ):
            why = (
                "exchanged gradients add up, of which it lacks the first; write "
                "no_sync() there"
            )
        if len(_shrinking) > 1:
            why = "several models are attached, and a newcomer can join only one"

        def heal(engine: Engine) -> None:
            # if it fails, all ranks hear of it by the verdict
            if why:
                raise InvalidSetting(why)
            data = healing.packed(self._progress.messages)
            send(data, engine.world - 1, engine.routes.first_channel)

        return heal

    def _connected(self, old: Engine, decision: Survivors) -> tuple[Engine, Group]:
        """A new engine, and a process group of torch.distributed, of the survivors."""
        world = len(decision.ranks)
        ranks = old.who.in_job(decision.ranks)
        # Not within the old name: all keys there are deleted once all old ranks have
        # left.
        name = f"{old.who.name}, {world} after {decision.num_steps}"
        who = Membership(name, decision.ranks.index(old.rank), world, ranks)
        engine = self._connect(who if world > 1 else ALONE._replace(ranks=ranks))
        self._undo.callback(engine.close)
        known = self._run.group
        if world == old.world:
            return engine, known
        backends = dist.get_backend_config(known)
        name += "/group"
        group: Group = engine.meanwhile(
            "connect",
            lambda: open_group(name, who.rank, world, old.timeout, backends),
        )
        register_group(group, name, ranks, backends)
        return engine, group


def _all_lose(models: Sequence[Shrinking], failure: RankFailed) -> None:
    """Goes on in models; raises an alarm on all of them before it waits for any."""
    for model in models:
        model._break_off(failure)
    for model in models:
        model._lose(failure)
