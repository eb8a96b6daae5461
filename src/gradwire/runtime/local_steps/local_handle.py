"""LocalSteps: the handle of local steps, and the rhythm in which fragments are exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...contract import Exchange
from ...errors import invalid
from ..handle import Handle
from ..setup.refusals import Strangers
from ..step.progress import Progress
from .outer import Outer


@dataclass(frozen=True)
class Rhythm:
    """When fragments are exchanged and take effect; raises ``InvalidSetting`` where that cannot be.

    Source: Streaming DiLoCo, algorithm 2 (H = ``every``, tau = ``delay``, alpha = ``mixing``).
    """

    every: int
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise invalid(name, value, f"an integer of at least {least}", "count local steps")
        if self.every % self.fragments:
            accepted = f"a divisor of every, {self.every}, as fragments take turns evenly"
            raise invalid("fragments", self.fragments, accepted, "change one of the two")
        if self.delay >= self.gap:
            accepted = f"fewer than {self.gap}, the steps from one launch to the next"
            raise invalid("delay", self.delay, accepted, "take a shorter delay or fewer fragments")
        if not (isinstance(self.mixing, int | float) and 0 <= self.mixing < 1):
            accepted = "a number in [0, 1), since 1 would ignore the mean"
            raise invalid("mixing", self.mixing, accepted, "leave it out")

    @property
    def gap(self) -> int:
        """Local steps from one exchange to the next."""
        return self.every // self.fragments


class LocalSteps(Handle):
    """The handle that ``gw.local_steps`` returns. Other methods are those of ``Handle``."""

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange,
        progress: Progress,
        undo: ExitStack,
        *,
        outer: Outer,
        rhythm: Rhythm,
        fragments: list[list[str]],
        strangers: Strangers,
    ) -> None:
        super().__init__(model, exchange, progress, None, None, undo)
        progress.num_fragments = len(fragments)
        self._outer, self._rhythm, self._fragments = outer, rhythm, fragments
        self._strangers = strangers
        self._algorithm = f"local steps with outer {outer.settings[0]} through {exchange!r}"
        self._local_step = self._counted_from = 0
        self._position = 0
        """Local steps since the period began, below ``every``."""
        self._left = 0
        """Local steps until ``_arriving`` takes effect; 0 where nothing is on its way."""
        self._arriving: dict[str, Tensor] = {}
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
        """The anchors by parameter name, the same on all ranks bit for bit. Do not write to them.

        They are the parameters that ranks have agreed on, which DiLoCo evaluates.
        """
        return {name: anchor.detach() for name, anchor in self._outer.anchors.items()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: gradients always stay on this rank until the optimizer steps."""
        yield

    def count_step(self) -> None:
        """Counts a local step, and does what is due after it; called by the optimizer's hook."""
        self._engine.check()
        rhythm = self._rhythm
        self._local_step += 1
        self._position += 1
        if self._left:
            self._left -= 1
            if not self._left:
                self._apply(rhythm.mixing)
        number, rest = divmod(self._position, rhythm.gap)
        if not rest:
            if self._left:  # a state that was saved with a longer delay
                self._apply(rhythm.mixing)
            self._position %= rhythm.every
            self._launch(self._fragments[number - 1])
            self._left = rhythm.delay
            if not rhythm.delay:
                self._apply(rhythm.mixing)

    def end_period(self) -> None:
        """Exchanges everything now. All ranks then have the same parameters, and a new period
        begins.

        All ranks must call this between the same two steps: before evaluation, and at the end of
        training.
        """
        self._between_steps("end_period()")
        self._apply(self._rhythm.mixing)
        for names in self._fragments:
            self._launch(names)
            self._apply(0.0)
        self._position = 0

    def _launch(self, names: Sequence[str]) -> None:
        """Sends this rank's pseudo-gradients on their way."""
        self._strangers.before_backward()
        self._progress.begin_step(names)
        for name in reversed(names):  # in issue order
            delta = self._arriving[name] = self._outer.pseudo_gradient(name)
            self.synchroniser.ready(name, delta)

    def _apply(self, mixing: float) -> None:
        """Lets what was launched take effect, if anything was."""
        self.synchronize()
        means, self._arriving, self._left = self._arriving, {}, 0
        if means:
            self._outer.apply(means, mixing)

    def synchronize(self) -> None:
        """Waits for means that are on their way. They take effect when they are due."""
        self._progress.finish()

    def stats(self) -> dict[str, Any]:
        """Figures of this rank, as those of ``Handle.stats``, for local steps.

        - ``steps`` counts local steps, and ``exchanges`` those that exchanged a fragment.
        - ``every`` is the period.
        - ``*_per_step`` are per local step. ``step_s`` is the median time between two exchanges
          over the steps between them.
        """
        self.synchronize()
        found, steps = super().stats(), self._local_step - self._counted_from
        exchanges = found["steps"]
        for key in found:
            if key.endswith("_per_step"):
                found[key] *= exchanges / max(1, steps)
        found["step_s"] /= self._rhythm.gap
        return {**found, "steps": steps, "exchanges": exchanges, "every": self._rhythm.every}

    def residuals(self) -> dict[str, Tensor]:
        """The residuals of this rank by parameter name: pseudo-gradients not sent yet."""
        self.synchronize()
        return super().residuals()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's local steps: save one file a rank.

        It has anchors, the state of the outer optimizer, residuals, the place in the period and
        pending means. It also has this rank's parameters, which ``load_state_dict`` restores. Save
        buffers and the inner optimizer beside it, for each rank too.
        """
        saved = super().state_dict()
        arriving = {name: mean.clone() for name, mean in self._arriving.items()}
        place = {"position": self._position, "left": self._left, "arriving": arriving}
        return {**saved, "local_step": self._local_step, "outer": {**self._outer.state(), **place}}

    def _checked(self, saved: Mapping[str, Any], strict: bool) -> Callable[[], None]:
        put_exchanges = super()._checked(saved, strict)
        local_step, outer = saved.get("local_step"), saved.get("outer", {})
        put_outer = self._outer.checked(outer)
        if type(local_step) is not int or local_step < 0:
            remedy = "pass what handle.state_dict() returned"
            raise invalid("local_step of the state", local_step, "a whole number", remedy)

        def put_in_place() -> None:
            put_exchanges()
            put_outer()
            self._local_step = self._counted_from = local_step
            self._position = outer["position"] % self._rhythm.every
            self._left = outer["left"]
            own = self._outer.anchors
            self._arriving = {
                name: torch.empty_like(own[name]).copy_(mean)
                for name, mean in outer["arriving"].items()
            }

        return put_in_place

    def _between_steps(self, what: str, *, takes_a_torn_step: bool = False) -> None:
        if not takes_a_torn_step:
            self.synchronize()
        super()._between_steps(what, takes_a_torn_step=takes_a_torn_step)
