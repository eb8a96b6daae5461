"""PartialSteps: local steps whose rounds close without the slowest ranks.

A push is a rank's pseudo-gradient of a fragment, and a merge is the mean of some pushes
(`rounds`). The training thread counts steps, applies merges and encodes pushes, all
between two local steps. It never waits for the network, except in joint calls. Another
thread carries messages and merges the pushes to this rank's fragments
(``round_service.py``).

A fragment's anchors lie in one row of memory, and the outer optimizer's parameters are
views of it. Each rank steps its own copy of the anchors, by the same payloads.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...contract.bounds import check_whole
from ...contract.spec import NamedParam, TensorSpec
from ...errors import InvalidSetting, invalid, log
from ...exchange.rounds import (
    FragmentLearner,
    FragmentOwner,
    PartialRounds,
    RoundCodec,
    Rules,
)
from ..engine.plain import packed, unpacked
from ..liveness.alarm import listed
from ..state.outer_state import DAMAGED, NO_LOADS
from ..state.table import copied
from ..step.progress import Progress
from ..transport.task_graph import wall_clock
from ..transport.wire import as_on_a_lane
from .going_on import Successors
from .lock_step import LocalAttachment, LocalSteps, Rhythm
from .mail import Note
from .outer import Outer
from .round_service import RoundService, Survival

_RELOAD = (
    "weights were loaded between two local steps under quorum=, where ranks are at "
    "different steps; call end_period() on all ranks just before"
)


class Fragment:
    """Some parameters, and their anchors as one row."""

    def __init__(
        self, params: Sequence[NamedParam], outer: Outer, inner: Optimizer
    ) -> None:
        self._params = params
        self._outer = outer
        self._inner = inner
        self._anchors = [outer.anchors[name] for name, _ in params]
        self.numels = [param.numel() for _, param in params]
        rows = [anchor.detach().flatten() for anchor in self._anchors]
        self.anchor_N = torch.cat(rows)
        for anchor, part in zip(self._anchors, self.parts(self.anchor_N), strict=True):
            anchor.data = part.view(anchor.shape)

    def parts(self, row_N: Tensor) -> tuple[Tensor, ...]:
        """The parts of a row, one for each parameter."""
        return torch.split(row_N, self.numels)

    def by_name(self, row_N: Tensor) -> dict[str, Tensor]:
        """The parts of a row in the parameters' shapes, by their names."""
        parts = self.parts(row_N)
        return {
            name: part.view(param.shape)
            for (name, param), part in zip(self._params, parts, strict=True)
        }

    def spec(self, device: str) -> TensorSpec:
        """The spec of the row, as ``device`` encodes it."""
        shapes = tuple(tuple(param.shape) for _, param in self._params)
        numel = self.anchor_N.numel()
        return TensorSpec("fragment", numel, self.anchor_N.dtype, shapes, device)

    def gathered(self) -> Tensor:
        """The parameters, copied into one row."""
        return torch.cat([param.detach().flatten() for _, param in self._params])

    def put(self, param_N: Tensor) -> None:
        """Puts a row into the parameters."""
        params = [param.detach() for _, param in self._params]
        for param, part in zip(params, self.by_name(param_N).values(), strict=True):
            param.copy_(part)

    def step(self, mean_N: Tensor) -> None:
        """Steps the anchors by a mean pseudo-gradient."""
        self._outer.step(self.by_name(mean_N))

    def packed(self, part: slice, *, is_for_newcomer: bool) -> Tensor:
        """The bytes of some anchors, and of the outer optimizer's state for them.

        A newcomer also gets the inner optimizer's state for their parameters.
        """
        outer = self._outer.optimizer.state
        inner = self._inner.state if is_for_newcomer else {}
        kept = [
            [anchor.detach(), dict(outer[anchor]), dict(inner.get(param, {}))]
            for anchor, (_, param) in self._pairs(part)
        ]
        return packed(copied(kept))

    def take_over(self, part: slice, payload_B: Tensor) -> None:
        """Replaces some anchors and states by those that another rank ``packed``."""
        pairs = self._pairs(part)
        kept = unpacked(payload_B)
        for (anchor, (_, param)), fields in zip(pairs, kept, strict=True):
            value, outer, inner = fields
            anchor.detach().copy_(value)
            self._outer.optimizer.state[anchor] = _on(anchor.device, outer)
            if inner:
                self._inner.state[param] = _on(param.device, inner)

    def _pairs(self, part: slice) -> list[tuple[Tensor, NamedParam]]:
        """Some anchors with their parameters."""
        return [*zip(self._anchors[part], self._params[part], strict=True)]


def _on(device: torch.device, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state of a parameter; numbers stay on the host, as counts do."""
    return {
        key: value.to(device) if isinstance(value, Tensor) and value.dim() else value
        for key, value in state.items()
    }


class ParamRows(dict[int, Tensor]):
    """The rows of all fragments' parameters, each gathered when it is first read."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._fragments = fragments

    def __missing__(self, fragment: int) -> Tensor:
        self[fragment] = self._fragments[fragment].gathered()
        return self[fragment]


class PartialSteps(LocalSteps):
    """The handle of ``gw.local_steps(..., quorum=...)``.

    It has the methods of ``Handle`` and of the handle in lock step. ``end_period``,
    ``state_dict`` and ``load_state_dict`` wait until all ranks have called them, at
    whatever local step each is. ``anchors`` are of the merges that this rank has taken
    in.

    >>> import gradwire as gw
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> handle = gw.local_steps(model, optimizer, "none", every=10, quorum=1)
    >>> for step in range(25):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 4)).square().mean().backward()
    ...     handle.count_tokens(8)
    ...     optimizer.step()
    >>> handle.end_period()  # on all ranks, which now have the same parameters
    >>> handle.step, handle.steps_of_all, handle.tokens
    (25, 25, 200)
    >>> handle.detach()
    """

    def __init__(
        self, way: LocalAttachment, progress: Progress, undo: ExitStack
    ) -> None:
        super().__init__(way, progress, undo)
        assert way.rules is not None, "without a quorum ranks are in lock step"
        params = dict(way.params)
        self._rules = way.rules
        self._codec = way.codec
        self._flat = [
            Fragment([(name, params[name]) for name in names], way.outer, way.inner)
            for names in way.fragments
        ]
        self._number = self._engine.rank
        """This rank's number in the rounds."""
        self._num_first = self._engine.world
        """The ranks that have begun together."""
        newcomer = way.newcomer
        run = None
        if newcomer is not None:
            engine, group, values = newcomer.admitted
            run = Successors(engine, group, way.channel, values, newcomer.start_s)
            self._number = newcomer.offer.labels[-1]
            self._num_first = values[0]["first"]
            self._loads.tally = tuple(values[0]["loads"])
        self._survives = way.healing is not None
        self._rounds = self._made_rounds(way.tape)
        survival = None
        if way.healing is not None:
            survival = self._survival(way, way.healing.fingerprint)
        self._ended_at = 0
        """The steps of all ranks when they last had the same parameters."""
        self._tokens = 0
        """Tokens of the local step under way."""
        self._counted_bytes = 0
        self._came: dict[int, tuple[dict[str, Any], float, int]] = {}
        """By rank, newcomers whose work is in no merge yet: their entry in ``stats()``,
        the time at which they were noticed, and the number of their pushes in merges.
        """
        self._service = RoundService(self._engine, self._rounds, survival, run)
        undo.callback(self._service.close)
        weakref.finalize(self, self._service.close)
        if run is not None:
            self._catch_up(run)

    def _survival(self, way: LocalAttachment, fingerprint: str) -> Survival:
        """How the run goes on without lost ranks, and with newcomers."""
        this = weakref.ref(self)
        first_label = self._num_first
        if way.newcomer is not None:
            first_label = self._number - way.newcomer.offer.number + 1
        elif dist.is_initialized():
            first_label = dist.get_world_size()

        def on_epoch(run: Successors) -> None:
            if (handle := this()) is not None:
                handle._begin_epoch(run)

        def shared() -> dict[str, Any]:
            handle = this()
            return {} if handle is None else handle._for_newcomers()

        return Survival(way.engine_of, on_epoch, fingerprint, shared, first_label)

    def _for_newcomers(self) -> dict[str, Any]:
        """The values that a newcomer takes over beside the rounds."""
        return {"first": self._num_first, "loads": self._loads.tally}

    def _catch_up(self, run: Successors) -> None:
        """Waits, as a newcomer, for the run's anchors."""
        self._service.wait_for(
            lambda: not self._rounds.is_new, self._settle, needed=set
        )
        # the state that was taken over does not count as weights that the loop loads
        self._loads.note()
        self._note_newcomer(self._number, run.since_s)

    def _made_rounds(
        self, tape: Callable[[str], object] | None = None
    ) -> PartialRounds:
        """New rounds that begin at the present anchors."""
        world = self._num_first
        rank = self._number
        rules = self._rules
        learners = []
        for fragment, flat in enumerate(self._flat):
            spec = flat.spec(flat.anchor_N.device.type)
            codec = RoundCodec(self._codec, spec, rank, world)
            learner = FragmentLearner(rank, fragment, codec, rules, flat.anchor_N, flat)
            if not self._survives:
                learner.merged = deque(maxlen=0)
            learners.append(learner)

        def make_owner(fragment: int) -> FragmentOwner:
            spec = self._flat[fragment].spec("cpu")
            codec = RoundCodec(self._codec, spec, rank, world)
            return FragmentOwner(fragment, codec, rules, world)

        return PartialRounds(rank, world, learners, make_owner, tape)

    def _begin_epoch(self, run: Successors) -> None:
        """Notes who has left or come; called in the thread of the rounds."""
        engine = run.engine
        before = {*self._engine.who.numbers}
        now = {*engine.who.numbers}
        self._synchroniser.go_on(engine, [])
        self._run.go_on(engine.who, run.group)
        weakref.finalize(self, engine.finish_and_close)
        for rank in now - before:
            self._note_newcomer(rank, run.since_s)
        if gone := tuple(sorted(before - now)):
            self._note_loss(gone, run)

    def _note_newcomer(self, rank: int, since_s: float) -> None:
        entry = {
            "rank": rank,
            "step": self._rounds.step,
            "seconds": time.monotonic() - since_s,
            "counted_s": None,
        }
        self._run.joined.append(entry)
        self._came[rank] = (entry, since_s, self._rounds.num_merged(rank))
        log.warning("rank %d of the job has joined", rank)

    def _note_counted(self) -> None:
        """Notes newcomers whose work is in a merge by now."""
        for rank, (entry, since_s, before) in self._came.copy().items():
            if self._rounds.num_merged(rank) > before:
                entry["counted_s"] = time.monotonic() - since_s
                self._came.pop(rank, None)

    def _note_loss(self, gone: tuple[int, ...], run: Successors) -> None:
        engine = run.engine
        for rank in gone:
            self._came.pop(rank, None)
        seconds = time.monotonic() - run.since_s
        entry = {"ranks": gone, "step": self._rounds.step, "seconds": seconds}
        self._run.left.append(entry)
        what = f"rank {listed(gone)} of the job is lost, and {engine.world} go on"
        if engine.world == 1:
            what = f"rank {listed(gone)} of the job is lost: this rank trains alone"
        if run.is_parted:
            what = f"this rank cannot reach rank {listed(gone)} of the job: it trains "
            what += "alone, and comes back once it can"
        elif not self._rounds.epoch.is_quorate:
            what += "; fewer than half are left, and means wait for end_period()"
        elif engine.world < self._rules.quorum:
            what += "; a mean waits for all of them, as the quorum is larger"
        log.warning("%s", what)

    @property
    def steps_of_all(self) -> int:
        """Local steps of all ranks, as far as this rank knows.

        They are the steps in merges that it has taken in, and its own.
        """
        learners = self._rounds.learners
        return sum(learner.known_steps for learner in learners) // len(learners)

    @property
    def tokens(self) -> int:
        """Tokens of all ranks that ``count_tokens`` has counted, like ``steps_of_all``.

        Schedules of the learning rate can follow it, and the end of training.
        """
        learners = self._rounds.learners
        return sum(learner.known_tokens for learner in learners) // len(learners)

    def count_tokens(self, num_tokens: int) -> None:
        """Counts tokens of the local step under way.

        Call it before ``optimizer.step()``, once for each batch.

        Args:
            num_tokens: The tokens, or examples, of a batch.
        """
        check_whole("num_tokens", num_tokens, "count the batch's tokens", least=0)
        self._tokens += num_tokens

    def _count(self, num_steps: int) -> None:
        self._has_stepped = True
        if not num_steps:
            return
        self._service.check()
        if self._rules.weights != "equal" and not self._tokens:
            remedy = (
                "call handle.count_tokens(n) before each optimizer.step(), or take "
                'weights="equal"'
            )
            weights = self._rules.weights
            raise invalid(f"tokens under weights={weights!r}", 0, "1 or more", remedy)
        for _ in range(num_steps):
            border = partial(self._rounds.border, tokens=self._tokens)
            self._tokens = 0
            self._service.ask(self._at_border(border))
        self._local_step = self._rounds.step
        if self._came:
            self._note_counted()
        self._engine.show_local_step(self._local_step)
        sent_bytes = self._service.sent_bytes
        costs = {"wire_bytes": sent_bytes - self._counted_bytes}
        self._counted_bytes = sent_bytes
        progress = self._progress
        progress.recorder.end_step(costs, wall_clock(), None)
        progress.write(self._local_step)

    def _at_border(self, act: Callable[[ParamRows], Any]) -> Any:
        """The value of ``act`` of parameters, which it may change between two steps."""
        learners = self._rounds.learners
        versions = [learner.version for learner in learners]
        rows = ParamRows(self._flat)
        with as_on_a_lane():
            value = act(rows)
            for fragment, learner in enumerate(learners):
                if learner.version != versions[fragment]:
                    self._flat[fragment].put(rows[fragment])
        return value

    def _settle(self) -> None:
        self._service.ask(self._at_border(self._rounds.settle))

    def _meet(self, call: str, *, is_last: bool = False) -> list[Note]:
        """Waits until all ranks have made this call, and no message is on its way.

        Before the call that ``is_last`` in a period, this rank pushes all its work.
        """
        self._take_loads()
        if is_last:
            self._service.ask(self._at_border(self._rounds.push_early))
        has_learnt = self._has_stepped or self._outer.has_learnt()
        tally = self._loads.tally
        note = Note(call, self._local_step, has_learnt, *tally, is_last=is_last)
        return self._service.meet(note, self._settle)

    def end_period(self) -> None:
        """Merges all that ranks have learnt, once all ranks have called it.

        All ranks then have the same parameters. A rank that comes early waits, and
        merges others' pushes meanwhile. If no rank has made a step since the last call,
        nothing happens. Ranks may come after different numbers of steps.

        Raises:
            RankFailed: A rank is lost, or has left.
            LoopMistake: Ranks have made different calls, or loaded different weights.
        """
        self._between_steps("end_period()")
        notes = self._meet("end_period()", is_last=True)
        if not any(note.has_learnt for note in notes):
            self._service.go_on()
            return
        requests = self._at_border(self._rounds.begin_last)
        self._service.go_on()
        self._service.ask(requests)
        last = partial(getattr, self._rounds, "last_owners")
        self._service.wait_for(lambda: not last(), self._settle, needed=last)
        self._has_stepped = False
        self._ended_at = self.steps_of_all

    def _take_loads(self) -> None:
        if not self._loads.may_be_pending:
            return
        loaded = self._loads.pending()
        if loaded and self.steps_of_all != self._ended_at:
            raise self._engine.give_up(_RELOAD, step=self._local_step)
        self._loads.take(loaded, ())
        self._outer.restart(loaded)

    def stats(self) -> dict[str, Any]:
        """Figures of this rank, as for local steps in lock step.

        ``exchanges`` counts the merges that this rank has taken in, and ``step_s`` is
        the median time of a local step. ``ranks`` are the ranks that are in, and
        ``has_quorum`` says whether they are enough for means to take effect.
        """
        figures = super().stats()
        figures["step_s"] *= self._rhythm.gap
        memory = figures["memory"]
        found = self._rounds.memory()
        for kind, size_bytes in found.items():
            memory[kind] += size_bytes
        numel = sum(flat.anchor_N.numel() for flat in self._flat)
        memory["bytes_a_parameter"] += sum(found.values()) / numel
        versions = [learner.version for learner in self._rounds.learners]
        epoch = self._rounds.epoch
        return {
            **figures,
            "averaged_by": "gradwire",
            "exchanges": sum(versions),
            "ranks": epoch.ranks,
            "has_quorum": epoch.is_quorate,
        }

    def residuals(self) -> dict[str, Tensor]:
        """This rank's residuals by parameter name: pseudo-gradients not sent yet."""
        found: dict[str, Tensor] = {}
        for flat, learner in zip(self._flat, self._rounds.learners, strict=True):
            if (residual_N := learner.codec.residual_N) is not None:
                parts = flat.by_name(residual_N)
                found |= {name: part.flatten() for name, part in parts.items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, once all ranks have called this.

        Save one file for each rank. The state is that of lock step, and the pushes that
        are in no merge yet.
        """
        self._between_steps("state_dict()")
        self._meet("state_dict()")
        try:
            # Ranks compare local_step, and are at different ones.
            state = {**super().state_dict(), "local_step": 0}
            return {**state, "rounds": copied(self._rounds.state())}
        finally:
            self._service.go_on()

    def load_state_dict(
        self, state_dict: dict[str, Any], *, strict: bool = True
    ) -> None:
        """Continues from a saved state of as many ranks; all ranks must call it."""
        self._between_steps("load_state_dict()")
        # The note names no loads: the loop may load weights just before, which this
        # state replaces.
        note = Note("load_state_dict()", self._local_step, True, *NO_LOADS)
        self._service.meet(note, self._settle)
        try:
            super().load_state_dict(state_dict, strict=strict)
        finally:
            self._service.go_on()

    def _shared(self, saved: Mapping[str, Any]) -> dict[str, str]:
        learners: Iterable[Any] = saved["rounds"]["learners"]
        versions = [learner["version"] for learner in learners]
        return {**super()._shared(saved), "rounds of fragments": str(versions)}

    def _checked(self, saved: Mapping[str, Any], strict: bool) -> Callable[[], None]:
        put_others = super()._checked(saved, strict)
        world = self._engine.world
        remedy = "end the period before you save, and start anew with its weights"
        if saved["saved_by"] != world:
            what = "the number of ranks that saved a state under quorum="
            raise invalid(what, saved["saved_by"], f"{world}, as now", remedy)
        if saved["rounds"].get("epoch") or self._rounds.epoch.number:
            what = "a state under quorum= that is saved or loaded after a rank was lost"
            raise invalid(what, "one", "a state of all ranks", remedy)
        loaded = self._made_rounds()
        try:
            loaded.load(saved["rounds"])
        except (KeyError, TypeError, ValueError, RuntimeError, StopIteration) as error:
            raise InvalidSetting(
                "the state has no rounds of this model and these fragments "
                f"({type(error).__name__}: {error}); {DAMAGED}, saved with a quorum"
            ) from error

        def put_in_place() -> None:
            put_others()
            self._rounds.go_on_from(loaded)
            self._local_step = loaded.step
            self._counted_from = loaded.step

        return put_in_place


def rules_of(asked: Mapping[str, Any], rhythm: Rhythm) -> Rules | None:
    """The rules of rounds with a quorum; None for lock step.

    Raises ``InvalidSetting`` for settings that do not go together.
    """
    if asked["quorum"] is None:
        for name, default in _IN_LOCK_STEP.items():
            if asked[name] != default:
                accepted = "left out without quorum=, in lock step"
                raise invalid(name, asked[name], accepted, "pass quorum= too")
        return None
    for name in ("delay", "mixing", "outer_dtype", "outer_device"):
        if value := asked[name]:
            accepted = "left out beside quorum="
            raise invalid(name, value, accepted, "train in lock step, or leave it out")
    grace = asked["grace"]
    if grace is None or (isinstance(grace, str) and grace != "adaptive"):
        raise invalid("grace", grace, "'adaptive' or seconds, from 0", "leave it out")
    tape = asked["tape"]
    if tape is not None and not callable(tape):
        raise invalid("tape", tape, "a function of a JSON line", "pass tape=print")
    return Rules(
        quorum=asked["quorum"],
        every=rhythm.every,
        fragments=rhythm.fragments,
        grace_s=None if grace == "adaptive" else grace,
        weights=asked["weights"],
        merge=asked["merge"],
        is_measured=tape is not None,
    )


_IN_LOCK_STEP = {
    "grace": "adaptive",
    "weights": "equal",
    "merge": "mean",
    "tape": None,
}


def refuse_mixed(params: Sequence[NamedParam]) -> None:
    """Raises ``InvalidSetting`` for parameters that one row cannot hold."""
    kinds = sorted({f"{param.dtype} on {param.device}" for _, param in params})
    if len(kinds) > 1:
        raise invalid(
            "parameters under quorum=",
            " and ".join(kinds),
            "of one dtype on one device, as they travel in one row",
            "leave quorum= out",
        )
