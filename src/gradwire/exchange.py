"""Exchange: the whole way of one gradient, from this rank's values to the mean over all ranks.

``pair`` makes one from a compressor and a collective; ``with_error_feedback`` wraps any of them so
that what did not arrive is kept for the next step; ``run_local`` runs one on all ranks in this
process.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .collective._local import drive
from .collective._types import Collective
from .collective._verbs import Steps
from .collective.allgather_sparse import allgather_sparse
from .collective.allreduce import allreduce
from .collective.casync_ps import casync_ps
from .contract import (
    Compressor,
    Exchange,
    Layout,
    Member,
    Result,
    State,
    synchronise_alone,
    synchronise_by_run,
)
from .errors import IncompatiblePair, InvalidSetting, invalid
from .load import load
from .spec import TensorSpec, check_gradient, working_dtype


def synchronise(
    exchange: Any,
    me: Member,
    state: State,
    grad_N: Tensor,
    out_N: Tensor,
    residual_N: Tensor | None = None,
) -> Steps[State]:
    """``exchange.synchronise`` where there is one, else the same by ``run``."""
    own = getattr(exchange, "synchronise", None)
    if own is None:
        return synchronise_by_run(exchange, me, state, grad_N, out_N, residual_N)
    steps: Steps[State] = own(me, state, grad_N, out_N, residual_N)
    return steps


@dataclass(frozen=True)
class Pair(Exchange):
    """A compressor and a collective that suits it; made by ``pair``."""

    codec: Compressor
    collective: Collective

    def init(self, spec: TensorSpec, world: int) -> State:
        return self.collective.init(self.codec, spec, world)

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        if me.world == 1:
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        state = yield from self.collective.run(self.codec, me, state, grad_N, out_N, residual_N)
        return state

    @property
    def exact_size(self) -> bool:
        """Whether what is sent follows from the spec alone."""
        return self.codec.traits.exact_size and self.collective.exact_size

    def wire_bytes(self, spec: TensorSpec, world: int) -> list[int] | None:
        return self.expected_bytes(spec, world) if self.exact_size else None

    def expected_bytes(self, spec: TensorSpec, world: int) -> list[int]:
        return [0] if world == 1 else self.collective.expected_bytes(self.codec, spec, world)


def pair(codec: Compressor, collective: Collective) -> Pair:
    """An exchange from a compressor and a collective.

    Raises ``IncompatiblePair`` if the compressor's traits are not what the collective needs.

    >>> from gradwire.compress.onebit import onebit
    >>> try:
    ...     pair(onebit(), allreduce())
    ... except IncompatiblePair as error:
    ...     print(str(error).partition(": ")[2])
    it sums payloads on the way, and these payloads cannot be summed; use casync_ps()
    """
    if not isinstance(codec, Compressor):
        raise _no_compressor(codec)
    if not isinstance(collective, Collective):
        raise invalid("collective", collective, "a collective", "write gw.collective.casync_ps()")
    for trait, why in _ONLY_FOR_EXCHANGES.items():
        if getattr(codec.traits, trait):
            raise IncompatiblePair(f"{codec!r} declares {trait}, and {why}")
    refusal = collective.needs.refusal(codec.traits)
    if refusal is not None:
        raise IncompatiblePair(
            f"{codec!r} cannot go with {collective!r}: {refusal}; use {suited(codec)!r}"
        )
    return Pair(codec, collective)


_ONLY_FOR_EXCHANGES = {
    "whole_tensors": "payloads are of flat vectors that any collective may cut; write it as an "
    "exchange of its own, as powersgd is",
    "shared_support": "a compressor encodes what its own rank holds, before anyone can agree on "
    "the elements to take; write it as an exchange of its own, as cltk is",
}
"""Traits that a compressor cannot keep, and why."""


def _no_compressor(given: object) -> InvalidSetting:
    """What ``pair`` says of something else; of an algorithm that needs no collective, why not."""
    traits = given.traits if isinstance(given, Exchange) else None
    if traits is None:
        return invalid("codec", given, "a compressor", "write gw.compress.topk(density=0.01)")
    why = "it talks in the middle"
    if traits.shared_support:
        why = "its ranks agree on the elements to take, and all-reduce the values at them"
    return IncompatiblePair(
        f"{given!r} is an exchange of its own, and goes with no collective: {why}; give it to "
        "gw.attach or gw.exchange_for by itself"
    )


def suited(codec: Compressor) -> Collective:
    """The collective that a compressor's traits suit when the user names none."""
    if codec.traits.layout is Layout.SPARSE:
        return allgather_sparse()
    return allreduce() if codec.traits.additive else casync_ps()


def named_collective(exchange: object) -> Collective | None:
    """The collective that a user has named for an exchange; None where it has the suited one.

    >>> from gradwire.collective.zen import zen
    >>> from gradwire.compress.topk import topk
    >>> named_collective(with_error_feedback(pair(topk(), zen())))
    zen(seed=0, formats='smallest')
    >>> named_collective(exchange_for(topk()))
    """
    while isinstance(exchange, Wrapper):
        exchange = exchange.inner
    found = getattr(exchange, "collective", None)
    codec: Any = exchange.codec if isinstance(exchange, Pair) else exchange
    return found if isinstance(found, Collective) and found != suited(codec) else None


def exchange_for(algorithm: Compressor | Exchange) -> Exchange:
    """The exchange of an algorithm given alone: its suited collective, error feedback if it needs
    it.

    An algorithm that talks in the middle is an exchange already; one that declares nothing, such as
    a pair, is what the user made it. Raises ``InvalidSetting`` for what is neither.

    >>> from gradwire.compress.topk import topk
    >>> exchange_for(topk()).inner.collective
    allgather_sparse()
    """
    if isinstance(algorithm, Compressor):
        made: Exchange = pair(algorithm, suited(algorithm))
        return with_error_feedback(made) if algorithm.traits.error_feedback else made
    _check_exchange(algorithm)
    declared = getattr(algorithm, "traits", None)
    needs_feedback = declared is not None and declared.error_feedback
    return with_error_feedback(algorithm) if needs_feedback else algorithm


def _check_exchange(given: Any) -> None:
    """Raises ``InvalidSetting`` for what is not an exchange, or is the class of one."""
    is_one = callable(getattr(given, "run", None)) and not isinstance(given, type | Compressor)
    if not is_one:
        remedy = "make one by gw.exchange_for(compressor) or gw.pair(compressor, collective)"
        raise invalid("exchange", given, "an exchange", remedy)


def by_name(
    compressor: str,
    settings: Mapping[str, Any],
    collective: str | None,
    *,
    error_feedback: bool = False,
) -> Exchange:
    """The exchange that files of ``compress/`` and ``collective/`` make together, as plans name it.

    ``collective`` is None for an algorithm that is an exchange of its own, and only for one. Raises
    ``InvalidSetting`` for an unknown name, an unknown setting or an impossible pair.

    >>> by_name("none", {}, "allreduce") == exchange_for(load("compress", "none")())
    True
    """
    made = algorithm_by_name(compressor, settings)
    if isinstance(made, Compressor):
        if collective is None:
            raise invalid("collective", None, f"one that {compressor} can use", "name it")
        made = pair(made, load("collective", collective)())
    elif collective is not None:
        own = f"None, as {compressor} is an exchange of its own"
        raise invalid("collective", collective, own, "leave it out")
    return with_error_feedback(made) if error_feedback else made


def algorithm_by_name(name: str, settings: Mapping[str, Any]) -> Any:
    """The compressor, or exchange of its own, of a file of ``compress/`` under these settings.

    Raises ``InvalidSetting`` for an unknown name and an unknown or impossible setting.
    """
    kind = load("compress", name)
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(settings) - known):
        accepted = ", ".join(sorted(known)) or "none at all"
        raise invalid(f"setting of {name}", unknown[0], accepted, "leave it out")
    return kind(**settings)


@dataclass(frozen=True)
class Wrapper(Exchange):
    """An exchange around another one: what a wrapper does not change is as the inner one states."""

    inner: Exchange

    @abstractmethod
    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Result]:
        """As ``synchronise``; what a wrapper changes is no loss, so the default does not serve."""

    @abstractmethod
    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        """Hands the inner exchange what it is to send, and a residual if it is given one."""

    @property
    def keeps_whole(self) -> bool:
        return bool(getattr(self.inner, "keeps_whole", False))

    @property
    def same_threads(self) -> bool:
        return bool(getattr(self.inner, "same_threads", False))

    def wire_bytes(self, spec: TensorSpec, world: int) -> list[int] | None:
        stated = getattr(self.inner, "wire_bytes", None)  # one that only has the form may lack it
        return None if stated is None else stated(spec, world)

    def expected_bytes(self, spec: TensorSpec, world: int) -> list[int] | None:
        stated = getattr(self.inner, "expected_bytes", None)
        return self.wire_bytes(spec, world) if stated is None else stated(spec, world)


class FeedbackState(NamedTuple):
    """What was not sent yet (working dtype), and the inner exchange's state."""

    residual_N: Tensor
    inner: State


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Adds to each gradient what earlier steps did not deliver; made by ``with_error_feedback``.

    Source: Seide et al. 2014; Karimireddy et al., ICML 2019, algorithm 2.
    Differences: wraps the exchange, not the compressor, so losses inside a collective are kept too.
    State: residual_N in the working dtype. It is reused: ``synchronise`` updates it in place.
    """

    def init(self, spec: TensorSpec, world: int) -> FeedbackState:
        residual_N = torch.zeros(spec.numel, dtype=working_dtype(spec.dtype))
        return FeedbackState(residual_N, self.inner.init(spec, world))

    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Result]:
        mean_N = torch.empty_like(grad_N, memory_format=torch.contiguous_format)
        before_N = state.residual_N.clone()
        state = yield from self.synchronise(Member(rank, world), state, grad_N, mean_N)
        return mean_N, before_N.add_(grad_N).sub_(state.residual_N), state

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        if residual_N is not None:
            # An outer wrapper keeps the account: hand it all that is pending here.
            residual_N.add_(state.residual_N)
            state.residual_N.zero_()
        kept_N = state.residual_N if residual_N is None else residual_N
        inner = yield from synchronise(self.inner, me, state.inner, grad_N, out_N, kept_N)
        return FeedbackState(state.residual_N, inner)


def with_error_feedback(exchange: Exchange) -> ErrorFeedback:
    """Wraps an exchange so that what did not arrive in the mean is added to the next gradient.

    The law: sum over ranks of (gradient + old residual) = W * mean + sum over ranks of new
    residuals.
    """
    _check_exchange(exchange)
    return ErrorFeedback(exchange)


def residuals(state: State) -> dict[str, Tensor]:
    """All residual tensors in an exchange's state, by name.

    A residual is a NamedTuple field whose name begins with ``residual``; the name given is its
    path.

    >>> sorted(residuals(FeedbackState(torch.zeros(2), None)))
    ['residual']
    """
    found: dict[str, Tensor] = {}
    if isinstance(state, tuple):
        names = getattr(state, "_fields", tuple(str(i) for i in range(len(state))))
        for name, value in zip(names, state, strict=True):
            if isinstance(value, Tensor) and name.startswith("residual"):
                found[name.removesuffix("_N")] = value
            for inner, tensor in residuals(value).items() if isinstance(value, tuple) else ():
                found[f"{name}.{inner}"] = tensor
    return found


def clone_state(state: State) -> State:
    """A copy of a state that shares no tensor with it."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, tuple):
        parts = [clone_state(part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def run_local(
    exchange: Exchange,
    grads: Sequence[Tensor],
    states: Sequence[State] | None = None,
    seed: int = 0,
) -> list[Result]:
    """Runs one step of an exchange with one rank for each gradient, all in this process.

    ``grads`` are 1-D, one a rank, of one length and dtype; ``states`` what an earlier call
    returned. Neither is changed. ``seed`` picks the interleaving of ranks. Returns (mean,
    contributed, state) a rank; raises ``Deadlock`` if ranks wait for each other.

    >>> grads = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    >>> from gradwire.compress.none import none
    >>> [mean.tolist() for mean, _, _ in run_local(exchange_for(none()), grads)]
    [[2.0, 4.0], [2.0, 4.0]]
    """
    return drive(texts(exchange, grads, states), seed=seed).results


def texts(
    exchange: Exchange, grads: Sequence[Tensor], states: Sequence[State] | None = None
) -> list[Steps[Result]]:
    """One rank's ``run`` for each gradient, ready for a driver."""
    _check_exchange(exchange)
    if not grads:
        raise invalid("grads", grads, "one gradient a rank", "pass a list of 1-D tensors")
    for grad in grads:
        check_gradient(grad)
    shapes = {(tuple(g.shape), g.dtype) for g in grads}
    if len(shapes) > 1:
        raise invalid("grads", shapes, "1-D, of one length and dtype", "pass grad.flatten()")
    world = len(grads)
    if states is not None and len(states) != world:
        raise invalid("states", f"{len(states)} states", f"one a rank, {world}", "pass all")
    spec = TensorSpec("gradient", grads[0].numel(), grads[0].dtype)
    before = (
        [exchange.init(spec, world) for _ in grads]
        if states is None
        else [clone_state(s) for s in states]
    )
    return [exchange.run(rank, world, before[rank], grad) for rank, grad in enumerate(grads)]
