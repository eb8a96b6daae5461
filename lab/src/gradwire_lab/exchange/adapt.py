"""Adaptation: each layer has settings of its own, chosen by what they lose of it.

A rank, a bit width or a density that is right for one layer wastes bytes on another.
Every so many steps ranks measure what each setting would lose of each tensor, and add
these losses up. Then all of them take the settings of fewest bytes whose losses
together are no more than allowed.

Source: Markov, Alimohammadi, Frantar and Alistarh, "L-GreCo: Layerwise-adaptive
    Gradient Compression for Efficient Data-parallel Deep Learning", MLSys 2024 (arXiv
    2210.17357).
Differences: written after the paper's idea, without its program. Losses are those of
    one step, of the gradient with its residual, which is what travels, and are added up
    over ranks, so that all decide alike. The units of the dynamic programme are finer
    the more tensors there are, and losses are rounded up: no more is lost than allowed.
    In the first ``every`` steps losses are measured in steps 1, 2, 4, 8 ..., as
    residuals fill.
Wire: the inner exchange's at the settings chosen; where losses are measured also an
    all-reduce of 8 (L + 1) bytes for each tensor and L settings, and those of powersgd
    at its largest rank, less the last.
State: step_T, the steps done (int64), rung_T, the number of the setting (int64), and
    lost_T, what each setting lost when it was last measured, and the squared norm
    (float64), for each tensor of the message, the same on all ranks; and the inner
    state, which goes on from setting to setting.
Contributed: the same as the inner exchange's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.steps.tensorwise import tensor_sizes
from gradwire.contract import Compressor, Exchange, Member, Residual, State, Traits
from gradwire.contract.bounds import check_number, check_whole
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.contract.verbs import AllReduce, Compute, Steps
from gradwire.errors import invalid
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import Chooser, ErrorFeedback, chooser_of

from ._cheapest import chosen, total
from .ladders import Ladder, ladder_of
from .places import tensor_places
from .warmup import Steps_T, count_step, no_steps, steps_done

EVERY = 500
"""Steps from one measurement to the next by default."""


class AdaptedState(NamedTuple):
    """Steps done, each tensor's rung, what was last measured of it, and the inner
    state.

    ``places`` and ``sizes`` are of the tensors that have elements; ``bytes_TL`` is what
    each of them costs at each rung.
    """

    step_T: Steps_T
    rung_T: tuple[Tensor, ...]
    lost_T: tuple[Tensor, ...]
    by: Adapted
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes_TL: list[list[int]]
    inner: State

    @property
    def rungs(self) -> list[int]:
        """The rungs of the tensors that have elements; in predictions, the given
        ones.
        """
        rungs_T = torch.stack([self.rung_T[place] for place in self.places])
        given_rungs = self.by.choices.given
        if rungs_T.is_meta:
            return [given_rungs] * len(self.places)
        return rungs_T.tolist()


@dataclass(frozen=True)
class Adapted(Chooser):
    """An exchange whose settings are chosen tensor by tensor; made by ``adapt``."""

    changes: ClassVar[bool] = True
    decides_by: ClassVar[tuple[str, ...]] = ("lost_T",)

    error: float | None = None
    every: int = EVERY

    def __post_init__(self) -> None:
        if self.error is not None:
            accepted = "a share of the gradient's norm in (0, 1], or None"
            check_number("error", self.error, accepted, "leave it out", 5e-324, 1)
        check_whole("every", self.every, "leave it out")
        if ladder_of(self.inner) is None:
            accepted = (
                "one with a density, a bit width or a rank to choose, or an "
                "exchange of one"
            )
            raise invalid("algorithm to adapt", self.inner, accepted, "leave adapt out")

    @cached_property
    def choices(self) -> Ladder:
        """The settings that there are to choose from."""
        ladder = ladder_of(self.inner)
        assert ladder is not None, "refused when it was made"
        return ladder

    @cached_property
    def declared(self) -> Traits:
        """Tensors must not be cut: each has one setting, the same on all ranks."""
        return replace(super().declared, whole_tensors=True)

    def init(self, spec: TensorSpec, world: int) -> AdaptedState:
        ladder = self.choices
        return AdaptedState(
            no_steps(spec),
            tuple(
                torch.full((), ladder.given, dtype=torch.int64)
                for _ in spec.tensor_shapes
            ),
            tuple(
                torch.zeros(len(ladder.settings) + 1, dtype=torch.float64)
                for _ in spec.tensor_shapes
            ),
            self,
            tensor_places(spec),
            tensor_sizes(spec),
            ladder.bytes_TL(spec),
            ladder.init(spec, world),
        )

    def synchronise(
        self,
        me: Member,
        state: AdaptedState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        rungs = state.rungs
        done = steps_done(state.step_T)
        measures = me.world > 1 and done is not None and self.is_due(done + 1)
        if measures:
            yield from self._measure(me, state, grad_N, residual_N)
        inner = yield from self.choices.synchronise(
            me, state.inner, rungs, grad_N, out_N, residual_N
        )
        count_step(state.step_T)
        if measures:
            self.choose([state])
        return state._replace(inner=inner)

    def is_due(self, step: int) -> bool:
        """Whether losses are measured in the step of this number, counted from 1."""
        return step > 0 and (
            step % self.every == 0 or (step < self.every and step.bit_count() == 1)
        )

    def _measure(
        self, me: Member, state: AdaptedState, grad_N: Tensor, residual_N: Residual
    ) -> Steps[None]:
        """Notes the losses of all rungs, and the squared norms, summed over ranks."""
        whole_N = grad_N.to(working_dtype(grad_N.dtype), copy=True)
        if residual_N is not None:
            pending_N = residual_N
            yield Compute("accumulate", lambda: whole_N.add_(pending_N), grad_N.numel())
        own_TL = yield from self.choices.measure(me, state.inner, whole_N)
        tensors = torch.split(whole_N, [*state.sizes])
        norms = [
            torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors
        ]
        squares_T = torch.stack(norms).square()
        announced = torch.cat([own_TL, squares_T[:, None]], 1)
        yield AllReduce(announced.view(-1))
        if not announced.isfinite().all():
            announced.zero_()
        for place, row in zip(state.places, announced, strict=True):
            state.lost_T[place].copy_(row)

    def choose_together(self, states: Sequence[State]) -> None:
        adapted = [adapted for state in states for adapted in adapted_states(state)]
        if any(self.is_due(steps_done(state.step_T) or 0) for state in adapted):
            self.choose(adapted)

    def settings(self, state: State) -> list[str]:
        (adapted,) = adapted_states(state)
        return [self.choices.settings[int(rung)] for rung in adapted.rung_T]

    def check(self, state: State, names: Sequence[str]) -> None:
        (adapted,) = adapted_states(state)
        most = len(self.choices.settings) - 1
        for name, rung in zip(names, map(int, adapted.rung_T), strict=True):
            if rung > most:
                remedy = "load an older checkpoint, as this one is damaged"
                raise invalid(f"rung_T of {name}", rung, f"0 to {most}", remedy)

    def choose(self, states: Sequence[AdaptedState]) -> None:
        """Chooses the rungs of all tensors of messages, by what was last measured of
        them.

        They stay as they are where gradients were 0, or not finite.
        """
        each = [
            (state, k, place)
            for state in states
            for k, place in enumerate(state.places)
            if state.lost_T[place][-1]
        ]
        if not each:
            return
        lost_TM = [state.lost_T[place].tolist() for state, _, place in each]
        bytes_TL = [state.bytes_TL[k] for state, k, _ in each]
        lost_TL = [row[:-1] for row in lost_TM]
        given = (self.choices.given,) * len(lost_TL)
        own_lost = total(lost_TL, given)
        own_bytes = total(bytes_TL, given)
        allowed = own_lost
        if self.error is not None:
            allowed = self.error**2 * math.fsum(row[-1] for row in lost_TM)
        rungs = chosen(bytes_TL, lost_TL, allowed)
        if own_lost <= allowed and own_bytes <= total(bytes_TL, rungs):
            rungs = given
        for (state, _, place), rung in zip(each, rungs, strict=True):
            state.rung_T[place].fill_(rung)


def choose_together(taken: Iterable[tuple[Exchange, State]]) -> None:
    """Chooses settings anew, where an exchange does, after a step of these messages."""
    every: dict[Chooser, list[State]] = {}
    for exchange, state in taken:
        chooser = chooser_of(exchange)
        if chooser is not None:
            every.setdefault(chooser, []).append(state)
    for chooser, states in every.items():
        chooser.choose_together(states)


def adapted_states(state: State) -> Iterator[AdaptedState]:
    """The states of adaptations in an exchange's state."""
    if isinstance(state, AdaptedState):
        yield state
    elif isinstance(state, tuple):
        yield from chain.from_iterable(map(adapted_states, state))


def adapt(
    algorithm: Compressor | Exchange, *, error: float | None = None, every: int = EVERY
) -> Exchange:
    """The algorithm with a density, a bit width or a rank for each layer.

    The settings of all layers together send the fewest bytes for the allowed error.
    ``handle.stats()["adapted"]`` has the settings of each layer.

    Args:
        algorithm: ``topk``, ``dgc``, ``qsgd``, ``uniform`` or ``powersgd``, or a pair
            with one of them. Both may have error feedback, which stays outermost.
        error: The share of the norm of all gradients that a step may lose, in (0, 1].
            Default: the loss of the algorithm's own settings. If no settings lose as
            little, each layer has the most accurate settings.
        every: Steps between two measurements of losses, after those of steps 1, 2, 4, 8
            ... Default: 500.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: The algorithm has no such setting.

    >>> from gradwire.compress.topk import topk
    >>> from gradwire.exchange.by_name import run_local
    >>> spec = TensorSpec("two layers", 32, shapes=((16,), (16,)))
    >>> exchange = adapt(topk(density=0.25))
    >>> peaks, flat = torch.zeros(16), torch.ones(16)
    >>> peaks[0] = 9.0
    >>> states = [exchange.init(spec, 2) for _ in range(2)]
    >>> results = run_local(exchange, [torch.cat([peaks, flat])] * 2, states)
    >>> for setting in exchange.inner.settings(results[0][2]):
    ...     print(setting)
    topk(density=0.03125, values=torch.float32)
    topk(density=0.25, values=torch.float32)
    """
    made = exchange_for(algorithm)
    if isinstance(made, ErrorFeedback):
        return ErrorFeedback(Adapted(made.inner, error, every))
    return Adapted(made, error, every)
