"""Exchanges made of a few verbs, right and wrong ones, to see what the simulator makes of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.contract import Exchange, Member, State
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Compute, Steps, Verb

Row = Verb | tuple[Verb, ...]


class Says(Exchange):
    """Yields what ``rows(rank, world, grad_N)`` lists, one behind the other; averages nothing."""

    def __init__(self, rows: Callable[[int, int, Tensor], list[Row]]) -> None:
        self.rows = rows

    def init(self, spec: TensorSpec, world: int) -> State:
        return None

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        for row in self.rows(me.rank, me.world, grad_N):
            _ = yield row  # a list takes no results, so no `yield from`
        return state


def looks_at_values(rank: int, world: int, grad_N: Tensor) -> list[Row]:
    return [Compute("encode", lambda: int(torch.count_nonzero(grad_N)), grad_N.numel())]
