"""Exchanges by name, and run among ranks of one process.

``exchange_for`` gives an algorithm the exchange that suits it, ``by_name`` the one that
a plan names; ``run_local`` runs one on all ranks in this process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..compress.none import none
from ..contract import Compressor, Exchange, Member, Residual, Result, State
from ..contract.collective import Collective
from ..contract.registry import load
from ..contract.spec import TensorSpec, check_gradient, working_dtype
from ..contract.state import leaves, with_tensors
from ..contract.verbs import Steps
from ..errors import invalid
from .error_feedback import (
    ErrorFeedback,
    Wrapper,
    check_exchange,
    nested,
    with_error_feedback,
)
from .pair import Pair, pair, suited


def named_collective(exchange: object) -> Collective | None:
    """The collective that a user has named for an exchange.

    None where it has the suited one.

    >>> from gradwire.collective.zen import zen
    >>> from gradwire.compress.topk import topk
    >>> named_collective(with_error_feedback(pair(topk(), zen())))
    zen(seed=0, formats='smallest', partition='permutation')
    >>> named_collective(exchange_for(topk()))
    """
    *_, inner = nested(exchange)
    collective = getattr(inner, "collective", None)
    codec: Any = inner.codec if isinstance(inner, Pair) else inner
    return (
        collective
        if isinstance(collective, Collective) and collective != suited(codec)
        else None
    )


def servers_of(exchange: object) -> int:
    """The number of ranks that only aggregate in an exchange; 0 if all ranks train."""
    return getattr(named_collective(exchange), "servers", None) or 0


def is_pair(exchange: Exchange) -> bool:
    """Whether this is a compressor and a collective, maybe with error feedback.

    Any other exchange may average something else than gradients (velocities, factors of
    matrices), and rows of gradients cannot be sent in their place.
    """
    return isinstance(
        exchange.inner if isinstance(exchange, ErrorFeedback) else exchange, Pair
    )


def beside(exchange: object) -> Exchange:
    """The exchange of uncompressed gradients beside ``exchange``.

    It has the momentum and the clipping of ``exchange``, as the optimizer has neither
    for them. If ranks only aggregate there, they do so here too.

    >>> from gradwire.compress.topk import topk
    >>> beside(exchange_for(topk())) == exchange_for(none())
    True
    """
    if isinstance(exchange, Wrapper):
        inner = beside(exchange.inner)
        return replace(exchange, inner=inner) if exchange.goes_beside else inner
    if servers_of(exchange):
        assert isinstance(exchange, Pair), "a collective has servers"
        return pair(none(), exchange.collective)
    return exchange_for(none())


def momentum_of(exchange: object) -> float:
    """The momentum that an exchange applies to gradients, 0 if it applies none."""
    momenta = (
        wrapper.own_momentum
        for wrapper in nested(exchange)
        if isinstance(wrapper, Wrapper)
    )
    return next(filter(None, momenta), 0.0)


def exchange_for(algorithm: Compressor | Exchange) -> Exchange:
    """Makes the exchange that ``gw.attach`` uses for an algorithm.

    A compressor gets the collective that suits its traits, and error feedback if it
    needs it.

    Args:
        algorithm: A compressor, or an exchange, which stays as it is.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: ``algorithm`` is neither a compressor nor an exchange.

    >>> from gradwire.compress.topk import topk
    >>> exchange_for(topk()).inner.collective
    allgather_sparse()
    """
    if isinstance(algorithm, Compressor):
        made: Exchange = pair(algorithm, suited(algorithm))
        return with_error_feedback(made) if algorithm.traits.error_feedback else made
    check_exchange(algorithm)
    needs_feedback = algorithm.traits is not None and algorithm.traits.error_feedback
    return with_error_feedback(algorithm) if needs_feedback else algorithm


def by_name(
    compressor: str,
    settings: Mapping[str, Any],
    collective: str | None,
    *,
    collective_settings: Mapping[str, Any] | None = None,
    error_feedback: bool = False,
) -> Exchange:
    """The exchange that files of ``compress/`` and ``collective/`` make together, as
    plans name it.

    ``collective`` is None for an algorithm that is an exchange of its own, and only for
    one; then it has no settings either. Raises ``InvalidSetting`` for an unknown name,
    an unknown setting or an impossible pair.

    >>> by_name("none", {}, "allreduce") == exchange_for(load("compress", "none")())
    True
    """
    made = algorithm_by_name(compressor, settings)
    if isinstance(made, Compressor):
        if collective is None:
            raise invalid(
                "collective", None, f"one that {compressor} can use", "name it"
            )
        made = pair(made, _made("collective", collective, collective_settings or {}))
    elif collective is not None:
        raise invalid(
            "collective",
            collective,
            f"None, as {compressor} is an exchange of its own",
            "leave it out",
        )
    elif collective_settings:
        raise invalid(
            "collective_settings",
            collective_settings,
            f"none, as {compressor} takes no collective",
            "leave them out",
        )
    return with_error_feedback(made) if error_feedback else made


def algorithm_by_name(name: str, settings: Mapping[str, Any]) -> Any:
    """The compressor, or exchange, of a file of ``compress/`` under these settings.

    Raises ``InvalidSetting`` for an unknown name and an unknown or impossible setting.
    """
    return _made("compress", name, settings)


def _made(folder: str, name: str, settings: Mapping[str, Any]) -> Any:
    kind = load(folder, name)
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(settings) - known):
        accepted = ", ".join(sorted(known)) or "none at all"
        raise invalid(f"setting of {name}", unknown[0], accepted, "leave it out")
    return kind(**settings)


def clone_state(state: State) -> State:
    """A copy of a state that shares no tensor with it."""
    return with_tensors(state, (tensor.clone() for _, tensor in leaves(state)))


def run_local(
    exchange: Exchange,
    grads: Sequence[Tensor],
    states: Sequence[State] | None = None,
    seed: int = 0,
) -> list[Result]:
    """Runs one step of an exchange in this process, with one rank for each gradient.

    Args:
        exchange: The exchange.
        grads: One 1-D gradient a rank, all of one length and dtype. They are not
            changed.
        states: The states that an earlier call returned. None (the default): the first
            step.
        seed: Chooses the order in which ranks take turns. Default: 0.

    Returns:
        For each rank the mean, the part of its gradient that is in the mean, and its
        new state.

    Raises:
        Deadlock: Ranks wait for each other.
        InvalidSetting: Gradients differ in length or dtype.

    >>> import torch
    >>> grads = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    >>> from gradwire.compress.none import none
    >>> [mean.tolist() for mean, _, _ in run_local(exchange_for(none()), grads)]
    [[2.0, 4.0], [2.0, 4.0]]
    """
    from .local import drive  # only where ranks are made up in this process

    made = steps_of_all(exchange, grads, states)
    return drive(made, seed=seed, ranks_per_host=exchange.ranks_per_host).results


def steps_of_all(
    exchange: Exchange, grads: Sequence[Tensor], states: Sequence[State] | None = None
) -> list[Steps[Result]]:
    """One rank's step for each gradient, by its ``definition``, ready for a driver."""
    check_exchange(exchange)
    if not grads:
        raise invalid(
            "grads", grads, "one gradient a rank", "pass a list of 1-D tensors"
        )
    for grad in grads:
        check_gradient(grad)
    shapes = {(tuple(g.shape), g.dtype) for g in grads}
    if len(shapes) > 1:
        raise invalid(
            "grads", shapes, "1-D, of one length and dtype", "pass grad.flatten()"
        )
    world = len(grads)
    if states is not None and len(states) != world:
        raise invalid(
            "states", f"{len(states)} states", f"one a rank, {world}", "pass all"
        )
    spec = TensorSpec("gradient", grads[0].numel(), grads[0].dtype)
    before = (
        [exchange.init(replace(spec, rank=rank), world) for rank in range(world)]
        if states is None
        else [clone_state(s) for s in states]
    )
    each = enumerate(zip(before, grads, strict=True))
    return [definition(exchange, rank, world, *operands) for rank, operands in each]


class Accounting(Member):
    """A member with its own buffers, which notes how much of its gradient arrives."""

    __slots__ = ("contributed_N",)
    contributed_N: Tensor

    def through(
        self,
        exchange: Exchange,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        if isinstance(exchange, Wrapper):
            return (
                yield from super().through(exchange, state, grad_N, out_N, residual_N)
            )
        lost_N = residual_N
        if lost_N is None:
            dtype = working_dtype(grad_N.dtype)
            lost_N = torch.zeros(grad_N.numel(), dtype=dtype, device=grad_N.device)
        whole_N = lost_N.clone().add_(grad_N)
        state = yield from exchange.synchronise(self, state, grad_N, out_N, lost_N)
        self.contributed_N = whole_N.sub_(lost_N)
        return state


def definition(
    exchange: Exchange, rank: int, world: int, state: State, grad_N: Tensor
) -> Steps[Result]:
    """One step of an exchange with new buffers: returns (mean_N, contributed_N, state).

    ``contributed_N`` (working dtype) is the part of this rank's gradient in the mean:
    its sum over ranks is W times the mean. ``grad_N`` is not written.
    """
    me = Accounting(rank, world)
    mean_N = torch.empty_like(grad_N, memory_format=torch.contiguous_format)
    state = yield from me.through(exchange, state, grad_N, mean_N)
    return mean_N, me.contributed_N, state
