"""What collectives and exchanges are tried with: worlds, sizes, dtypes, and who pairs with whom."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from math import isqrt
from types import FunctionType

import torch
from torch import Tensor

from gradwire.contract import Compressor, Exchange, State
from gradwire.errors import IncompatiblePair
from gradwire.load import examples
from gradwire.pairing import Pair, pair, suited
from gradwire.spec import TensorSpec

SIZES = (0, 1, 5, 8, 9, 64, 1000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How many ranks, how long a gradient, of which dtype, drawn and interleaved by which seed."""

    world: int
    numel: int
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def grads(self, step: int = 0) -> list[Tensor]:
        """One gradient a rank; other ones for another step."""
        draw = torch.Generator().manual_seed(1000 * self.seed + step)
        return [torch.randn(self.numel, generator=draw).to(self.dtype) for _ in range(self.world)]

    @property
    def spec(self) -> TensorSpec:
        """Two square matrices and a vector, for exchanges that act on matrices."""
        side = isqrt(self.numel // 2)
        shapes = ((side, side), (side, side), (self.numel - 2 * side * side,))
        return TensorSpec("gradient", self.numel, self.dtype, shapes=shapes)

    def states(self, exchange: Exchange) -> list[State]:
        """One rank's state each, before the first step."""
        return [exchange.init(self.spec, self.world) for _ in range(self.world)]

    def __str__(self) -> str:
        return f"{self.world}x{self.numel} {str(self.dtype).removeprefix('torch.')} s{self.seed}"


EVERY_WORLD_AND_SIZE = tuple(
    Case(world=world, numel=numel, seed=world + numel) for world in range(1, 10) for numel in SIZES
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
    Case(world=9, numel=64, seed=7),
)
"""Each dtype and size class, small and large worlds: what wrong specimens are shown with."""

ALWAYS = Case(world=3, numel=300, seed=3)
"""Every exchange is held to every law with this one."""


def rotated(turn: int) -> tuple[Case, ...]:
    """``ALWAYS`` and one of ``FEW``: over nine turns each comes up.

    All of them for all pairs under all laws would take minutes and find the same.
    """
    return (ALWAYS, FEW[turn % len(FEW)])


def compressors() -> tuple[Compressor, ...]:
    """The examples of ``compress/`` that are compressors; the others are ``own_exchanges``."""
    return tuple(made for made in examples("compress") if isinstance(made, Compressor))


def own_exchanges() -> tuple[Exchange, ...]:
    """The examples of ``compress/`` that talk in the middle, and so are exchanges themselves."""
    return tuple(made for made in examples("compress") if isinstance(made, Exchange))


@cache
def pairs() -> tuple[Pair, ...]:
    """Every example of a compressor with the collective that suits it, one with all that take it.

    That one is the last, whose blocks are the shortest. All with all would take minutes more. For
    the same reason a scheme that sees entries alone (its bytes follow from which elements are
    taken) is tried with two kinds: a lossless codec, and one that takes equally many each time.
    """
    widest = {type(codec): codec for codec in compressors()}.values()
    made = []
    for codec in compressors():
        for collective in examples("collective"):
            if codec not in widest and collective != suited(codec):
                continue
            if not (collective.exact_size or codec.traits.lossless or codec.traits.exact_size):
                continue
            try:
                made.append(pair(codec, collective))
            except IncompatiblePair:
                continue
    return tuple(made)


def name_of(exchange: object) -> str:
    """A short test id, the same in every process: functions have no addresses in it."""
    if isinstance(exchange, partial):
        settings = ", ".join(f"{name}={value}" for name, value in exchange.keywords.items())
        return f"{name_of(exchange.func)}({settings})"
    if isinstance(exchange, FunctionType):
        return exchange.__name__
    if isinstance(exchange, Pair):
        return f"{exchange.codec!r}-{type(exchange.collective).__name__}".replace("torch.", "")
    return repr(exchange)
