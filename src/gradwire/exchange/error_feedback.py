"""Error feedback: the part of a gradient that did not arrive is added to the next one.

It is one of several exchanges around another one; all of them are a ``Wrapper``.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import (
    Compressor,
    EncodesTensors,
    Exchange,
    Member,
    Residual,
    State,
    Traits,
)
from ..contract.spec import TensorSpec, working_dtype
from ..contract.state import leaves
from ..contract.verbs import Steps
from ..errors import InvalidSetting, invalid, names_checked, with_brackets
from .pair import Pair


def check_exchange(value: Any) -> None:
    """Raises ``InvalidSetting`` for a value or class that is not an exchange."""
    if not isinstance(value, Exchange):
        raise invalid(
            "exchange",
            value,
            "an exchange",
            with_brackets(
                value,
                "make one by gw.exchange_for(compressor) or gw.pair(compressor, "
                "collective)",
            ),
        )


@dataclass(frozen=True)
class Wrapper(Exchange):
    """An exchange around another one, whose traits it has unless it changes them."""

    goes_beside: ClassVar[bool] = False
    """Whether uncompressed gradients take it too, as the optimizer lacks its effect."""
    of_gradients: ClassVar[bool] = True
    """Whether its means are means of gradients, and not of momentum."""
    is_of_rank: ClassVar[bool] = False
    """Whether it changes a rank's own gradient, so that a host's mean is too late."""
    changes: ClassVar[bool] = False
    """Whether its payloads may change from step to step by themselves."""
    is_of_schemes: ClassVar[bool] = False
    """Whether a step takes one of the installed ``sparse_schemes``."""

    inner: Exchange

    def init(self, spec: TensorSpec, world: int) -> State:
        return self.inner.init(spec, world)

    @abstractmethod
    def synchronise(self, *operands: Any, **named: Any) -> Steps[State]:
        """Calls the inner exchange by ``me.through``, with any given residual."""

    @property
    def own_momentum(self) -> float:
        """The momentum that it applies to gradients itself."""
        return 0.0

    @cached_property
    def declared(self) -> Traits:
        inner = self.inner.declared
        return replace(inner, exact_size=inner.exact_size and not self.changes)

    @property
    def ranks_per_host(self) -> int:
        return self.inner.ranks_per_host


def nested(exchange: Any) -> Iterator[Any]:
    """An exchange, and the exchanges inside it, one in the other."""
    yield exchange
    if isinstance(exchange, Wrapper):
        yield from nested(exchange.inner)


def chooses_scheme(exchange: Exchange) -> bool:
    """Whether the exchange depends on the sparse schemes that are installed."""
    return any(
        isinstance(part, Wrapper) and part.is_of_schemes for part in nested(exchange)
    )


class Chooser(Wrapper):
    """A wrapper that chooses settings for each tensor, over all messages of a step.

    Its states are the states of its messages' exchanges, whatever wraps it.
    """

    @abstractmethod
    def choose_together(self, states: Sequence[State]) -> None:
        """Chooses settings anew after a step."""

    @abstractmethod
    def settings(self, state: State) -> list[str]:
        """The settings of each tensor of a message, in words."""

    @abstractmethod
    def check(self, state: State, names: Sequence[str]) -> None:
        """Raises ``InvalidSetting`` where a loaded state has an unknown setting."""


def chooser_of(exchange: Exchange) -> Chooser | None:
    """The chooser that an exchange is, or is around; None where there is none."""
    return next((part for part in nested(exchange) if isinstance(part, Chooser)), None)


class FeedbackState(NamedTuple):
    """The residual (working dtype), not sent yet, and the inner exchange's state."""

    residual_N: Tensor
    inner: State


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Adds to each gradient the part that earlier steps did not deliver.

    Made by ``with_error_feedback``.

    Source: Seide et al. 2014; Karimireddy et al., ICML 2019, algorithm 2.
    Differences: wraps the exchange, not the compressor, so losses inside a collective
        are kept too.
    State: residual_N in the working dtype. It is reused: ``synchronise`` updates it in
        place.
    """

    def init(self, spec: TensorSpec, world: int) -> FeedbackState:
        residual_N = torch.zeros(spec.numel, dtype=working_dtype(spec.dtype))
        return FeedbackState(residual_N, self.inner.init(spec, world))

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        if residual_N is not None:
            # An outer wrapper keeps the account: hand it all that is pending here.
            residual_N.add_(state.residual_N)
            state.residual_N.zero_()
        kept_N = state.residual_N if residual_N is None else residual_N
        inner = yield from me.through(self.inner, state.inner, grad_N, out_N, kept_N)
        return FeedbackState(state.residual_N, inner)


def tensor_encoder(exchange: Exchange) -> EncodesTensors | None:
    """The part of an exchange that encodes tensors apart.

    None where a message is encoded as one.
    """
    inner = exchange.inner if isinstance(exchange, ErrorFeedback) else exchange
    return inner if isinstance(inner, EncodesTensors) else None


def encoder_state(state: State) -> tuple[State, Residual]:
    """The state of an exchange's ``tensor_encoder``, and the residual around it."""
    if isinstance(state, FeedbackState):
        return state.inner, state.residual_N
    return state, None


@names_checked
def with_error_feedback(exchange: Exchange) -> ErrorFeedback:
    """Adds error feedback: the part that was not sent is added to the next gradient.

    ``gw.attach`` does this by itself for a compressor that needs it. The law: the sum
    over ranks of (gradient + old residual) = W * mean + the sum over ranks of new
    residuals.

    Args:
        exchange: An exchange, for example ``gw.pair(compressor, collective)``.

    Returns:
        The exchange with a residual of one element for each element of the gradient.

    Raises:
        InvalidSetting: The residual could grow without bound, as the exchange may lose
            more than it was given.

    >>> from gradwire.collective.casync_ps import casync_ps
    >>> from gradwire.compress.uniform import uniform
    >>> from gradwire.exchange.pair import pair
    >>> try:
    ...     with_error_feedback(pair(uniform(bitwidth=2), casync_ps()))
    ... except InvalidSetting as error:
    ...     print(str(error).partition(";")[2])
     use it without error feedback: it is unbiased, so its errors cancel over steps
    """
    check_exchange(exchange)
    refusal = feedback_refusal(exchange)
    if refusal is not None:
        raise refusal
    return ErrorFeedback(exchange)


def feedback_refusal(exchange: Exchange | Compressor) -> InvalidSetting | None:
    """The refusal of error feedback around an exchange; None if it is accepted.

    If an exchange can lose more than its gradient, residuals can grow without bound
    (compare Karimireddy et al., lemma 3). So an exchange is refused if its traits
    declare neither that it is nonexpansive nor a need of error feedback. An exchange
    that is lossless, or has no declared traits, is accepted.
    """
    *_, exchange = nested(exchange)
    algorithm = exchange.codec if isinstance(exchange, Pair) else exchange
    traits = algorithm.traits
    if (
        traits is None
        or traits.nonexpansive
        or traits.error_feedback
        or traits.lossless
    ):
        return None
    remedy = "use it without error feedback"
    if traits.unbiased:
        remedy += ": it is unbiased, so its errors cancel over steps"
    return invalid(
        "an exchange with error feedback",
        algorithm,
        "nonexpansive, since residuals of anything else can grow without bound",
        remedy,
    )


def residuals(state: State) -> dict[str, Tensor]:
    """All residual tensors in an exchange's state, by name.

    A residual is a NamedTuple field whose name begins with ``residual``.

    Args:
        state: The state of an exchange, nested as it may be.

    Returns:
        The tensors by their path in the state.

    >>> sorted(residuals(FeedbackState(torch.zeros(2), None)))
    ['residual']
    """
    return {
        path.removesuffix("_N"): tensor
        for path, tensor in leaves(state)
        if path.rpartition(".")[2].startswith("residual")
    }
