"""LocalSteps: the handle of local steps in lock step, and the rhythm of exchanges."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...contract import Compressor
from ...contract.bounds import check_whole
from ...contract.verbs import Among
from ...errors import invalid
from ...exchange.rounds import Rules
from ..attach import Attachment
from ..engine.engine import CONTROL, figures_of_all
from ..grid.dtensors import reshard
from ..handle import Handle
from ..state.outer_state import NO_LOADS
from ..state.table import MOST_STEPS
from ..step.hooked import observing
from ..step.hooks import UnattachedParameters
from ..step.progress import Progress
from ..transport.task_graph import Task
from ..transport.wire import Channel
from .counting import Counting
from .loads import Loads
from .moment import LoopMoment, moments_of_all
from .outer import Outer

if TYPE_CHECKING:
    from ..state.sharded import Owners


@dataclass(frozen=True)
class Rhythm:
    """The steps at which fragments are exchanged and take effect.

    Raises ``InvalidSetting`` for values that do not fit together. Source: Streaming
    DiLoCo, algorithm 2 (H = ``every``, tau = ``delay``, alpha = ``mixing``).
    """

    every: int
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            check_whole(name, getattr(self, name), "count local steps", least=least)
        if self.every % self.fragments:
            accepted = (
                f"a divisor of every, {self.every}, as fragments take turns evenly"
            )
            raise invalid(
                "fragments", self.fragments, accepted, "change one of the two"
            )
        if self.delay >= self.gap:
            accepted = f"fewer than {self.gap}, the steps from one launch to the next"
            raise invalid(
                "delay", self.delay, accepted, "take a shorter delay or fewer fragments"
            )
        if not (isinstance(self.mixing, int | float) and 0 <= self.mixing < 1):
            accepted = "a number in [0, 1), since 1 would ignore the mean"
            raise invalid("mixing", self.mixing, accepted, "leave it out")

    @property
    def gap(self) -> int:
        """Local steps from one exchange to the next."""
        return self.every // self.fragments

    @property
    def settles(self) -> bool:
        """Whether every parameter is its anchor after each exchange."""
        return self.fragments == 1 and not self.delay and not self.mixing


class LocalAttachment(Attachment):
    """The attachment of local steps, as their handles see it."""

    rhythm: Rhythm
    outer: Outer
    fragments: list[list[str]]
    """The names of each fragment's parameters."""
    rules: Rules | None
    """The rules of rounds with a quorum; None in lock step."""
    codec: Compressor
    """The compressor of these rounds."""
    inner: Optimizer
    """The optimizer that the loop steps."""
    channel: Channel | None
    """The channel of the rounds that a newcomer has connected."""
    tape: Callable[[str], object] | None


class LocalSteps(Handle):
    """The handle of ``gw.local_steps``, with the other methods of ``Handle``."""

    def __init__(
        self, way: LocalAttachment, progress: Progress, undo: ExitStack
    ) -> None:
        exchange = way.settings.exchange
        rhythm = way.rhythm
        self._outer = way.outer
        super().__init__(
            way.model, exchange, progress, None, None, undo, way.run, way.backend
        )
        progress.num_fragments = len(way.fragments)
        self._rhythm = rhythm
        self._fragments = way.fragments
        self._unattached = UnattachedParameters(way.model, way.params, progress.give_up)
        undo.callback(self._unattached.remove)
        self._algorithm = (
            f"local steps with outer {way.outer.settings[0]} through {exchange!r}"
        )
        self._local_step = self._counted_from = 0
        self._position = 0
        """Local steps since the period began, below ``every``."""
        self._arriving: dict[str, Tensor] = {}
        """Pseudo-gradients on their way, by name; their means arrive in place."""
        self._left = 0
        """Local steps until these take effect; 0 where none are on their way."""
        self._announcing: Task | None = None
        """The task in which ranks announce their moments; None without one."""
        self._has_stepped = False
        """Whether an optimizer has stepped since parameters were their anchors."""
        self._loads = Loads(
            way.model, way.params, self._take_loads, self._any_of_island, undo
        )
        self._loads.note()
        this = weakref.ref(self)

        def settle() -> None:
            if (handle := this()) is not None:
                handle._apply(rhythm.mixing)

        undo.callback(settle)

    @property
    def step(self) -> int:
        """Number of local steps so far."""
        return self._local_step

    @property
    def outer(self) -> Optimizer:
        """The outer optimizer, whose parameters are the anchors."""
        return self._outer.optimizer

    def anchors(self) -> dict[str, Tensor]:
        """The anchors by parameter name, the same on all ranks bit for bit.

        They are the parameters that ranks have agreed on, and that DiLoCo evaluates. Do
        not write to them. The anchor of a DTensor is a DTensor in the same layout.
        """
        return self._outer.whole

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: gradients stay on this rank until the optimizer steps."""
        yield

    def _count(self, num_steps: int) -> None:
        """Counts the step of an optimizer, and does the work that is due after it.

        ``num_steps`` includes uncounted steps before this one. It is 0 if this step
        does not count.
        """
        self._has_stepped = True
        if not num_steps:
            return
        self._engine.check()
        rhythm = self._rhythm
        self._local_step += num_steps
        self._position += 1
        self._engine.show_local_step(self._local_step)
        if self._left:
            self._left -= 1
            if not self._left:
                self._apply(rhythm.mixing)
        number, rest = divmod(self._position, rhythm.gap)
        if not rest:
            if self._left:  # a state that was saved with a longer delay
                self._apply(rhythm.mixing)
            self._position %= rhythm.every
            self._launch(self._fragments[number - 1], announces=True)
            self._left = rhythm.delay
            if not rhythm.delay:
                self._apply(rhythm.mixing)
            self._has_stepped = not rhythm.settles

    def end_period(self) -> None:
        """Exchanges all parameters now.

        All ranks then have the same parameters, and a new period begins. If no rank has
        made a step since the last exchange of all parameters, nothing happens. All
        ranks must call this between the same two steps, for example at the end of
        training. The call is an exchange, so the training after it differs from a
        training without it.

        Raises:
            LoopMistake: Other ranks have not called it, or ranks have loaded different
                weights.
        """
        self._between_steps("end_period()")
        self._take_loads()
        self._announce(ends_period=True)
        moments = self._hear() or [self._moment(ends_period=True)]
        if not any(moment.has_learnt for moment in moments):
            return
        self._apply(self._rhythm.mixing)
        for names in self._fragments:
            self._launch(names)
            self._apply(0.0)
        self._position = 0
        self._has_stepped = False

    def _moment(self, *, ends_period: bool) -> LoopMoment:
        # Anchors are looked at only where it matters.
        has_learnt = self._has_stepped or bool(self._arriving) or not ends_period
        has_learnt = has_learnt or self._outer.has_learnt()
        return LoopMoment(self._local_step, ends_period, has_learnt, *self._loads.tally)

    def _announce(self, *, ends_period: bool) -> None:
        """Has ranks announce their moments beside the next work."""
        engine = self._engine
        num_parts = engine.shards.world
        if max(engine.world, num_parts) > 1:
            moment = self._moment(ends_period=ends_period)
            steps = moments_of_all(engine.world, num_parts, moment)
            self._announcing = engine.launch(0, "moments", steps, CONTROL)

    def _any_of_island(self, flags: list[bool]) -> list[bool]:
        """For each flag whether any rank of this rank's island has it."""
        rows = figures_of_all(self._engine, flags, Among.SHARDS)
        return [any(column) for column in zip(*rows, strict=True)]

    def _hear(self) -> list[LoopMoment]:
        """Waits for the moments that ranks announce; [] if none are on their way."""
        if self._announcing is None:
            return []
        announcing = self._announcing
        self._announcing = None
        self._engine.wait([announcing])
        moments: list[LoopMoment] = announcing.result
        return moments

    def _take_loads(self) -> None:
        """Restarts anchors at the values loaded since the last step.

        Means on their way to loaded parameters are dropped, as they belong to the
        values before.
        """
        if not self._loads.may_be_pending:
            return
        loaded = self._loads.pending()
        dropped = loaded.keys() & self._arriving.keys()
        self._loads.take(loaded, dropped)
        for name in dropped:
            del self._arriving[name]
        self._outer.restart(loaded)

    def _launch(self, names: Sequence[str], *, announces: bool = False) -> None:
        """Sends this rank's pseudo-gradients, and its moment if it ``announces``."""
        self._unattached.before_backward()
        self._progress.begin_step(names)
        if announces:
            self._announce(ends_period=False)
        for name in reversed(names):  # in issue order
            delta = self._arriving[name] = self._outer.pseudo_gradient(name)
            self._synchroniser.ready(name, delta)

    def _apply(self, mixing: float) -> None:
        """Lets the fragment on its way take effect, if there is one."""
        self._hear()
        self.synchronize()
        means = self._arriving
        self._arriving = {}
        self._left = 0
        if means:
            reshard(self._model)
            self._outer.apply(means, mixing)

    def synchronize(self) -> None:
        """Waits for means that are on their way. They take effect when they are due."""
        self._progress.finish()

    def stats(self) -> dict[str, Any]:
        """Figures of this rank, as in ``Handle.stats``, for local steps.

        - ``steps`` counts local steps, and ``exchanges`` the steps that exchanged a
          fragment.
        - ``every`` is the period.
        - ``memory`` has ``anchors`` too, with the outer optimizer's state.
        - ``*_per_step`` are per local step. ``step_s`` is the median time between two
          exchanges over the steps between them.
        """
        self.synchronize()
        figures = super().stats()
        steps = self._local_step - self._counted_from
        exchanges = figures["steps"]
        for key in figures:
            if key.endswith("_per_step"):
                figures[key] *= exchanges / max(1, steps)
        figures["step_s"] /= self._rhythm.gap
        anchors = self._outer.anchors.values()
        memory = figures["memory"]
        memory["anchors"] = sum(value.nbytes for _, value in self._outer.shared(None))
        numel = sum(anchor.numel() for anchor in anchors)
        memory["bytes_a_parameter"] += memory["anchors"] / numel
        return {
            **figures,
            "steps": steps,
            "exchanges": exchanges,
            "every": self._rhythm.every,
        }

    def residuals(self) -> dict[str, Tensor]:
        """This rank's residuals by parameter name: pseudo-gradients not sent yet."""
        self.synchronize()
        return super().residuals()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's local steps: save one file a rank.

        It has anchors, the state of the outer optimizer, residuals, the place in the
        period and pending means. It also has this rank's parameters, which
        ``load_state_dict`` restores. Save buffers and the inner optimizer beside it,
        for each rank too.
        """
        saved = super().state_dict()
        loaded = self._loads.pending()
        arriving = {
            n: mean.clone() for n, mean in self._arriving.items() if n not in loaded
        }
        outer = self._outer.state(restarted=loaded)
        outer |= {"position": self._position, "left": self._left, "arriving": arriving}
        outer["loads"] = self._loads.tally_with(
            loaded, loaded.keys() & self._arriving.keys()
        )
        return {**saved, "local_step": self._local_step, "outer": outer}

    @property
    def _owners(self) -> Owners:
        form = self._outer.form(arrives=self._rhythm.delay > 0)
        return super()._owners._replace(form=form)

    def _shared(self, saved: Mapping[str, Any]) -> dict[str, str]:
        outer = saved["outer"]
        return {
            **super()._shared(saved),
            "position in the period": str(outer["position"]),
            "steps until means take effect": str(outer["left"]),
            "pending means": ", ".join(sorted(outer["arriving"])),
        }

    def _checked(self, saved: Mapping[str, Any], strict: bool) -> Callable[[], None]:
        put_exchanges = super()._checked(saved, strict)
        local_step: Any = saved.get("local_step")
        outer = saved.get("outer", {})
        put_outer = self._outer.checked(outer)
        remedy = "pass what handle.state_dict() returned"
        check_whole(
            "local_step of the state", local_step, remedy, least=0, most=MOST_STEPS
        )

        def put_in_place() -> None:
            reshard(self._model)
            put_exchanges()
            put_outer()
            self._local_step = self._counted_from = local_step
            self._position = outer["position"] % self._rhythm.every
            self._left = outer["left"]
            anchors = self._outer.anchors
            self._arriving = {
                name: torch.empty_like(anchors[name], dtype=mean.dtype).copy_(mean)
                for name, mean in outer["arriving"].items()
            }
            self._has_stepped = False
            self._loads.tally = tuple(outer.get("loads", NO_LOADS))
            self._loads.note()

        return put_in_place

    def _between_steps(self, what: str, *, takes_a_torn_step: bool = False) -> None:
        if not takes_a_torn_step:
            self.synchronize()
        super()._between_steps(what, takes_a_torn_step=takes_a_torn_step)


def count_local_steps(handle: LocalSteps, counting: Counting, undo: ExitStack) -> None:
    """Has a handle count the steps of optimizers.

    The hooks change only the parameters of its model, and its optimizer steps as a
    whole.
    """
    this = weakref.ref(handle)  # hooks of the process must not keep it

    def before(optimizer: Optimizer, *_: Any) -> None:
        if (living := this()) is not None and counting.enters(optimizer):
            living._take_loads()

    def after(optimizer: Optimizer, *_: Any) -> None:
        if (living := this()) is not None:
            num_steps = counting.leaves(optimizer)
            if num_steps is not None:
                living._count(num_steps)

    for hook in (
        register_optimizer_step_pre_hook(observing(before)),
        register_optimizer_step_post_hook(observing(after)),
    ):
        undo.callback(hook.remove)
        weakref.finalize(handle, hook.remove)
