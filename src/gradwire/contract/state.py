"""The tensors in a state: their paths, by which saved state is found again."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from .compressor import State


def leaves(state: State, path: str = "") -> Iterable[tuple[str, Tensor]]:
    """(path, tensor) of every tensor in a state.

    >>> import torch
    >>> from gradwire.exchange.error_feedback import FeedbackState
    >>> [path for path, _ in leaves(FeedbackState(torch.zeros(1), (torch.ones(1),)))]
    ['residual_N', 'inner.0']
    """
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, tuple):
        names: Iterable[Any] = getattr(state, "_fields", range(len(state)))
        for name, part in zip(names, state, strict=True):
            yield from leaves(part, f"{path}.{name}" if path else str(name))


def with_tensors(state: State, tensors: Iterator[Tensor]) -> State:
    """The same state with other tensors, which come in the order of its ``leaves``."""
    if isinstance(state, Tensor):
        return next(tensors)
    return rebuilt(state, lambda part: with_tensors(part, tensors))


def rebuilt(state: State, changed: Callable[[State], State]) -> State:
    """The same state, ``changed`` in each of its parts, if it has any."""
    if not isinstance(state, tuple):
        return state
    parts = map(changed, state)
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
