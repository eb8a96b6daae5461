"""Worlds, sizes and dtypes that exchanges are tried with, and the order in which ranks
run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from gradwire.contract import Exchange, Member, State
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.error_feedback import Wrapper, residuals
from gradwire.exchange.local import drive
from gradwire.exchange.pair import Pair

from .tolerance import coarser

SIZES = (0, 1, 5, 8, 9, 64, 1000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How many ranks, how long a gradient, of which dtype, drawn and interleaved by
    which seed.
    """

    world: int
    numel: int
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def grads(self, step: int = 0) -> list[Tensor]:
        """One gradient a rank; other ones for another step."""
        draw = torch.Generator().manual_seed(1000 * self.seed + step)
        return [
            torch.randn(self.numel, generator=draw).to(self.dtype)
            for _ in range(self.world)
        ]

    @property
    def spec(self) -> TensorSpec:
        """Two square matrices and a vector, for exchanges that act on matrices."""
        side = isqrt(self.numel // 2)
        matrix = (side, side)
        rest = self.numel - 2 * side * side
        shapes = (matrix, matrix, (rest,))
        return TensorSpec("gradient", self.numel, self.dtype, shapes=shapes)

    def members(self) -> list[Member]:
        """Every rank's part in a message; the seed chooses the message's
        order.
        """
        return [
            Member(rank, self.world, order=1 + self.seed) for rank in range(self.world)
        ]

    def states(self, exchange: Exchange) -> list[State]:
        """One rank's state each, before the first step."""
        specs = [replace(self.spec, rank=rank) for rank in range(self.world)]
        return [exchange.init(spec, self.world) for spec in specs]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.world} ranks, {self.numel} elements, {dtype}, seed {self.seed}"


EVERY_WORLD_AND_SIZE = tuple(
    Case(world=world, numel=numel, seed=world + numel)
    for world in range(1, 10)
    for numel in SIZES
)

FEW = (
    Case(world=1, numel=9),
    Case(world=2, numel=0),
    Case(world=2, numel=64, dtype=torch.float64, seed=1),
    Case(world=3, numel=5, seed=2),
    Case(world=3, numel=300, seed=3),
    Case(world=4, numel=9, dtype=torch.bfloat16, seed=4),
    Case(world=5, numel=1, seed=5),
    Case(world=7, numel=200, dtype=torch.float16, seed=6),
    Case(world=6, numel=64, seed=7),
)
"""Each dtype and size class, small and large worlds."""


def thinned(grad_N: Tensor, every: int) -> Tensor:
    """The gradient in one of so many places, 0 in the others; with ``every`` = 0 in
    all.
    """
    thin_N = torch.zeros_like(grad_N)
    if every:
        thin_N[::every] = grad_N[::every]
    return thin_N


def kept_of(state: State, numel: int) -> Tensor:
    """All that a rank keeps for later, as one float64 tensor."""
    kept = [t.double() for t in residuals(state).values()]
    if not kept:
        return torch.zeros(numel, dtype=torch.float64)
    return torch.stack(kept).sum(0)


def kept_norm(states: Sequence[State], numel: int) -> float:
    """The norm of all that ranks keep for later."""
    return float(torch.stack([kept_of(state, numel) for state in states]).norm())


def stepped(
    exchange: Exchange,
    members: Sequence[Member],
    states: Sequence[State],
    grads: Sequence[Tensor],
    seed: int,
    outs: Sequence[Tensor] | None = None,
) -> list[State]:
    """All ranks' states after a step; means are written over the gradients, or into
    ``outs``.
    """
    rows = zip(members, states, grads, outs or grads, strict=True)
    all_steps = [exchange.synchronise(*row) for row in rows]
    hosts = exchange.ranks_per_host
    return drive(all_steps, seed=seed, ranks_per_host=hosts).results


def total_of(tensors: list[Tensor]) -> Tensor:
    """The sum of tensors, in float64."""
    return torch.stack([tensor.double() for tensor in tensors]).sum(0)


def accuracy(exchange: Exchange, case: Case) -> torch.dtype:
    """The dtype to whose rounding an exchange must balance.

    Float32, unless the mean is of 16 bits itself, or a collective sums 16-bit payloads
    on the way, whose rounding no rank sees.
    """
    coarsest = coarser(case.dtype, torch.float32)
    while isinstance(exchange, Wrapper):
        exchange = exchange.inner
    if not isinstance(exchange, Pair):
        return coarsest
    if exchange.collective.needs.additive and exchange.collective.encodes_sums:
        wire = exchange.codec.format(case.spec).fields[0].dtype
        return coarser(coarsest, wire)
    return coarsest


def states_of(results: list[Any]) -> list[State]:
    """The states among the results of ``run_local``, one a rank."""
    return [state for _, _, state in results]


def tensors_of(state: State) -> list[Tensor]:
    """All tensors in a state."""
    if isinstance(state, Tensor):
        return [state]
    parts = state if isinstance(state, tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]
