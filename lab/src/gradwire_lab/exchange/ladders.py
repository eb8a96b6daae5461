"""Ladders: an algorithm at several settings, of which each tensor of a message may take
one.

A pair sends every tensor through one collective, by a codec of its own; powersgd gives
every matrix a rank of its own. Letters: T tensors of a message, L rungs.

Rungs are an algorithm's settings, from the fewest bytes to the most. A ladder has:

* ``settings``: the settings of each rung, in words;
* ``given``: the rung of the algorithm's own settings;
* ``bytes_TL``: bytes of each tensor at each rung, in proportion to what travels;
* ``measure``: the squared norm of what each rung would lose of a gradient in the
  working dtype, this rank's in float64. It changes no state;
* ``synchronise``: the exchange with a number of a rung for each tensor.

The state is of one form whatever the rungs are, so they may change from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import starmap
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.collective.steps.size_only import SizeOnlyCompressor
from gradwire.collective.steps.tensorwise import Tensorwise, tensor_sizes
from gradwire.compress.powersgd import (
    MatrixState,
    MatrixStep,
    layout_of,
    powersgd,
    sent_numel,
)
from gradwire.compress.topk import topk
from gradwire.compress.uniform import BITWIDTHS as UNIFORM_BITWIDTHS
from gradwire.compress.uniform import uniform
from gradwire.contract import Compressor, Exchange, Member, Residual, State
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.contract.verbs import AllReduce, Compute, Steps
from gradwire.exchange.pair import Pair, PairState

from ..compress.dgc import dgc
from ..compress.qsgd import BITWIDTHS as QSGD_BITWIDTHS
from ..compress.qsgd import qsgd
from .places import tensor_places


def ladder_of(exchange: Exchange) -> Ladder | None:
    """The settings that tensors of a message may choose from; None where there are
    none.
    """
    ladder: Ladder | None = None
    if isinstance(exchange, Pair):
        ladder = PairLadder.of(exchange)
    elif isinstance(exchange, powersgd):
        ladder = MatrixLadder(exchange)
    if ladder is None or len(ladder.settings) <= 1:
        return None
    return ladder


# ---- a compressor for each tensor ----------------------------------------------------


_DENSITY_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""Densities of a sparsifier's ladder, as factors of its own."""


def _densities_around(density: float) -> tuple[float, ...]:
    """The densities of a ladder, none above 1.

    >>> _densities_around(0.4)
    (0.05, 0.1, 0.2, 0.4, 0.8)
    """
    return tuple(
        density * factor for factor in _DENSITY_FACTORS if density * factor <= 1
    )


def rungs_of(codec: Compressor) -> tuple[Compressor, ...]:
    """A compressor at several settings, itself among them, the fewest bytes first.

    States are of one form at all of them, so that they may change from step to step.
    """
    if isinstance(codec, SizeOnlyCompressor):
        return tuple(map(SizeOnlyCompressor, rungs_of(codec.codec)))
    if isinstance(codec, topk | dgc):
        return tuple(
            replace(codec, density=density)
            for density in _densities_around(codec.density)
        )
    if isinstance(codec, qsgd | uniform):
        bitwidths = QSGD_BITWIDTHS if isinstance(codec, qsgd) else UNIFORM_BITWIDTHS
        return tuple(replace(codec, bitwidth=bitwidth) for bitwidth in bitwidths)
    return (codec,)


@dataclass(frozen=True)
class Apiece(Tensorwise):
    """Encodes each tensor by a codec of its own: variants of one, of one form of
    state.
    """

    own: tuple[Compressor, ...] = ()

    @property
    def codecs(self) -> tuple[Compressor, ...]:
        return self.own

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        rungs = tuple(codec.for_world(world, rank) for codec in self.own)
        return Apiece(self.codec.for_world(world, rank), self.sizes, rungs)

    def chunk(self, start: int, stop: int) -> Compressor:
        each = zip(self.own, self.inside(start, stop), strict=True)
        parts = [(codec, size) for codec, size in each if size]
        if not parts:
            return self.codec
        rungs, sizes = zip(*parts, strict=True)
        return apiece(rungs, sizes)


def apiece(codecs: tuple[Compressor, ...], sizes: tuple[int, ...]) -> Compressor:
    """The codec for a message of tensors of ``sizes`` elements; at least one."""
    if len(codecs) == 1:
        return codecs[0]
    hollow = [codec.codec for codec in codecs if isinstance(codec, SizeOnlyCompressor)]
    if hollow:
        return SizeOnlyCompressor(apiece(tuple(hollow), sizes))
    return Apiece(codecs[0], sizes, codecs)


@dataclass(frozen=True)
class PairLadder:
    """A pair whose codec has ``rungs``: see ``rungs_of``."""

    pair: Pair
    rungs: tuple[Compressor, ...]

    @classmethod
    def of(cls, pair: Pair) -> PairLadder:
        """The rungs of a pair: where it is nonexpansive, the rungs that are so too."""
        own = pair.codec
        rungs = [
            codec
            for codec in rungs_of(own)
            if codec.traits.nonexpansive or not own.traits.nonexpansive
        ]
        return cls(pair, tuple(rungs))

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(map(repr, self.rungs))

    @property
    def given(self) -> int:
        return self.rungs.index(self.pair.codec)

    def bytes_TL(self, spec: TensorSpec) -> list[list[int]]:
        specs = [TensorSpec("", size, spec.dtype) for size in tensor_sizes(spec)]
        return [
            [codec.typical(spec).slot_bytes for codec in self.rungs] for spec in specs
        ]

    def init(self, spec: TensorSpec, world: int) -> PairState:
        sizes = tensor_sizes(spec)
        codec = apiece((self.pair.codec,) * len(sizes), sizes)
        for other in self.rungs:
            other.init(spec)  # compiles now what it needs, and not when it is chosen
        return PairState(sizes, self.pair.collective.init(codec, spec, world))

    def measure(self, me: Member, state: PairState, whole_N: Tensor) -> Steps[Tensor]:
        """Encodes and decodes every tensor at every rung, with states of their own."""
        tensors = torch.split(whole_N, list(state.sizes))
        errors: Tensor = yield Compute(
            "encode",
            lambda: torch.stack(
                [_lost(me.variant_of(codec), tensors) for codec in self.rungs], 1
            ),
            len(self.rungs) * whole_N.numel(),
        )
        return errors

    def synchronise(
        self,
        me: Member,
        state: PairState,
        rungs: Sequence[int],
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> Steps[State]:
        codecs = [self.rungs[rung] for rung in rungs]
        pair = Pair(apiece(tuple(codecs), state.sizes), self.pair.collective)
        after = yield from me.through(
            pair, PairState((), state.inner), grad_N, out_N, residual_N
        )
        if me.selection is not None:
            asked = sum(starmap(_asked, zip(codecs, state.sizes, strict=True)))
            me.selection = me.selection._replace(asked=asked)
        return PairState(state.sizes, after.inner)


def _asked(codec: Compressor, numel: int) -> float:
    return float(getattr(codec, "density", math.nan)) * numel


def _lost(codec: Compressor, tensors: Sequence[Tensor]) -> Tensor:
    """The squared norm of what one codec loses of each tensor."""
    states = [codec.init(TensorSpec.of(tensor)) for tensor in tensors]
    payloads = [payload for payload, _ in codec.encode_many(states, tensors)]
    decoded = [torch.empty_like(tensor) for tensor in tensors]
    codec.decode_many(payloads, decoded)
    torch._foreach_sub_(decoded, list(tensors))
    return (
        torch.stack([torch.linalg.vector_norm(d, dtype=torch.float64) for d in decoded])
        ** 2
    )


# ---- a rank for each matrix ----------------------------------------------------------


_RANKS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Ranks of the ladder, as factors of the one given."""


class LadderState(NamedTuple):
    """The spec of a message, and the state that its tensors have at the largest
    ranks.
    """

    spec: TensorSpec
    most: MatrixState


@dataclass(frozen=True)
class MatrixLadder:
    """powersgd at ranks around its own.

    Every matrix keeps a start of as many columns as the largest rank has, and a step
    takes the first of them. A column of a factor is made of the start's columns up to
    its own, and of no later one. So one step at the largest ranks shows what every
    smaller one would lose.
    """

    exchange: powersgd

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(
            sorted({max(1, round(self.exchange.rank * factor)) for factor in _RANKS})
        )

    @cached_property
    def settings(self) -> tuple[str, ...]:
        return tuple(repr(replace(self.exchange, rank=rank)) for rank in self.ranks)

    @property
    def given(self) -> int:
        return self.ranks.index(self.exchange.rank)

    def bytes_TL(self, spec: TensorSpec) -> list[list[int]]:
        item = working_dtype(spec.dtype).itemsize
        shapes = [spec.tensor_shapes[place] for place in tensor_places(spec)]
        return [
            [item * sent_numel(shape, rank) for rank in self.ranks] for shape in shapes
        ]

    def init(self, spec: TensorSpec, world: int) -> LadderState:
        most = [
            max(
                (rank for rank in self.ranks if sent_numel(shape, rank) < prod(shape)),
                default=1,
            )
            for shape in spec.tensor_shapes
        ]
        return LadderState(spec, self.exchange.started(spec, tuple(most)))

    def measure(self, me: Member, state: LadderState, whole_N: Tensor) -> Steps[Tensor]:
        """A step at the largest ranks, less its last all-reduce: a rank's own part is
        not sent.
        """
        places = tensor_places(state.spec)
        lost_TL = whole_N.new_zeros(len(places), len(self.ranks), dtype=torch.float64)
        if not state.most.layout.batches:
            return lost_TL
        step = MatrixStep(me, state.most, whole_N, whole_N)
        yield Compute("encode", partial(step.encode, 0), whole_N.numel())
        yield AllReduce(step.rounds[0])

        def note_lost() -> None:
            """The squared norm of a matrix less that of its projection; 0 where it
            stays dense.
            """
            step.encode(1)
            rows = dict(zip(places, lost_TL, strict=True))
            shapes = state.spec.tensor_shapes
            for m in step.layout.batches:
                whole_BNM, _, right_BMR = step.factors(m)
                kept_BR = torch.linalg.vector_norm(
                    right_BMR, dim=1, dtype=torch.float64
                )
                whole_B = torch.linalg.vector_norm(
                    whole_BNM, dim=(1, 2), dtype=torch.float64
                )
                lost_BR = whole_B.square()[:, None] - kept_BR.square().cumsum(1)
                for place, lost_R in enumerate(
                    lost_BR.clamp_min_(0.0), m.tensors.start
                ):
                    for rung, rank in enumerate(self.ranks):
                        if sent_numel(shapes[place], rank) < prod(shapes[place]):
                            rows[place][rung] = lost_R[rank - 1]

        yield Compute("encode", note_lost, whole_N.numel())
        return lost_TL

    def synchronise(
        self,
        me: Member,
        state: LadderState,
        rungs: Sequence[int],
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> Steps[State]:
        ranks = [1] * len(state.most.basis_T)
        for place, rung in zip(tensor_places(state.spec), rungs, strict=True):
            ranks[place] = self.ranks[rung]
        layout = layout_of(state.spec, tuple(ranks))
        forms = zip(state.most.basis_T, layout.basis_shapes, strict=True)
        bases = tuple(
            basis if len(form) == 1 else basis[:, : form[1]] for basis, form in forms
        )
        start = MatrixState(layout, bases)
        yield from me.through(self.exchange, start, grad_N, out_N, residual_N)
        return state


Ladder: TypeAlias = PairLadder | MatrixLadder
