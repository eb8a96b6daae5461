"""An exchange of every program of matrices, which torch carries out (``factors``), and its ladder.

Letters as in ``factors``: T tensors, B adjacent matrices of one shape and rank, R columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any, ClassVar, NamedTuple, dataclass_transform

import torch
from torch import Tensor

from ..contract import Exchange, Layout, Member, State, Traits, synchronise_alone
from ..contract.bounds import MOST_SEED, check_whole
from ..contract.ladder import Ladder
from ..contract.spec import TensorSpec, working_dtype
from ..contract.tensorwise import tensor_places
from ..contract.travel import bytes_sent
from ..contract.verbs import AllReduce, Compute, Steps
from .factors import FactorLayout, MatrixState, StepTensors, layout_of
from .matrices import LowRank, Matrix, trace_matrices


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class MatrixProgram(Exchange):
    """Base of exchanges that are programs of matrices; see ``matrices``.

    ``rank`` is R, the columns of ``start``, a whole number from 1; ``seed`` draws the start of the
    first step. A tensor is factorised where what travels of it is shorter than it is; others stay
    dense. The start's columns are scaled to a largest element of 1 between steps.

    >>> from gradwire.dsl.matrices import decomp, matmul
    >>> class twice(MatrixProgram):
    ...     "Two steps of subspace iteration in each step of training, of four all-reduces."
    ...
    ...     def encode(self, gradient, start):
    ...         return decomp(gradient, decomp(gradient, start)[1])
    ...
    ...     def decode(self, left, right):
    ...         return matmul(left, right.T)
    >>> twice(rank=2).wire_bytes(TensorSpec("w", 300, shapes=((10, 30),)), 2)
    [640, 640]
    """

    rank: int = 4
    seed: int = 0
    traits: ClassVar[Traits] = Traits(
        layout=Layout.LOW_RANK,
        contraction=True,
        error_feedback=True,
        whole_tensors=True,
        same_threads=True,
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Refuses settings that mean nothing, and what cannot be traced under these."""
        name = type(self).__name__
        check_whole(f"{name} rank", self.rank, "leave it out")
        check_whole(f"{name} seed", self.seed, "leave it out", least=0, most=MOST_SEED)
        self.traced()

    @abstractmethod
    def encode(self, gradient: Matrix, start: Matrix) -> tuple[Matrix, ...]:
        """The factors; the last is the next step's start."""

    @abstractmethod
    def decode(self, *factors: Any, **_: Any) -> Matrix:
        """The mean of gradients, of the factors."""

    def traced(self) -> LowRank:
        """The program under these settings, as rounds."""
        return _traced(self)

    def init(self, spec: TensorSpec, world: int) -> MatrixState:
        return self.started(spec, self.rank)

    def started(self, spec: TensorSpec, ranks: int | tuple[int, ...]) -> MatrixState:
        """State before the first step; ``ranks`` is the rank of all tensors, or that of each."""
        layout = layout_of(self.traced(), spec, ranks)
        dtype = working_dtype(spec.dtype)
        # What a tensor starts from follows from its shape alone, so fusing changes nothing.
        draws = [torch.Generator().manual_seed(self.seed) for _ in layout.basis_shapes]
        bases = [torch.empty(shape, dtype=dtype) for shape in layout.basis_shapes]
        return MatrixState(
            layout, tuple(b.normal_(generator=draw) for b, draw in zip(bases, draws, strict=True))
        )

    def synchronise(
        self,
        me: Member,
        state: MatrixState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        if me.world == 1:
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        held = StepTensors(me, self.traced(), state, grad_N, out_N, residual_N)
        for number, buffer in enumerate(held.rounds):
            if number and not held.batches:
                break
            yield Compute("encode", partial(held.encode, number), grad_N.numel())
            yield AllReduce(buffer)
        yield Compute("decode", held.decode, grad_N.numel())
        return state

    def ladder(self) -> Ladder:
        return MatrixLadder(self)

    def wire_bytes(self, spec: TensorSpec, world: int) -> list[int]:
        layout = layout_of(self.traced(), spec, self.rank)
        item = working_dtype(spec.dtype).itemsize
        sizes = (item * numel for numel in layout.round_numels)
        return [sum(bytes_sent("all_reduce", size, world) for size in sizes)] * world


@lru_cache(maxsize=1024)
def _traced(program: MatrixProgram) -> LowRank:
    return trace_matrices(program)


# ---- a rank for each matrix --------------------------------------------------------------------


_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Ranks of the ladder, as factors of the one given."""


class LadderState(NamedTuple):
    """The spec of a message, and the state that its tensors have at the largest ranks."""

    spec: TensorSpec
    most: MatrixState


@dataclass(frozen=True)
class MatrixLadder(Ladder):
    """A program of matrices at ranks around its own.

    Every matrix keeps a start of as many columns as the largest rank has, and a step takes the
    first of them. A column of a factor is made of the start's columns up to its own, and of no
    later one. So one step at the largest ranks shows what every smaller one would lose.
    """

    program: MatrixProgram

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(sorted({max(1, round(self.program.rank * factor)) for factor in _FACTORS}))

    @cached_property
    def settings(self) -> tuple[str, ...]:
        return tuple(repr(replace(self.program, rank=rank)) for rank in self.ranks)

    @property
    def given(self) -> int:
        return self.ranks.index(self.program.rank)

    def bytes_TL(self, spec: TensorSpec) -> list[list[int]]:
        item = working_dtype(spec.dtype).itemsize
        return [
            [item * sum(alone.round_numels) for alone in self._alone(shape)]
            for shape in map(spec.tensor_shapes.__getitem__, tensor_places(spec))
        ]

    def init(self, spec: TensorSpec, world: int) -> LadderState:
        return LadderState(
            spec, self.program.started(spec, tuple(map(self._most, spec.tensor_shapes)))
        )

    def measure(self, me: Member, state: LadderState, whole_N: Tensor) -> Steps[Tensor]:
        """A step at the largest ranks, less its last all-reduce: a rank's own part is not sent."""
        places = tensor_places(state.spec)
        lost_TL = whole_N.new_zeros(len(places), len(self.ranks), dtype=torch.float64)
        if not state.most.layout.batches:
            return lost_TL
        held = StepTensors(me, self.program.traced(), state.most, whole_N, whole_N, None)
        for number, buffer in enumerate(held.rounds):
            yield Compute("encode", partial(held.encode, number), whole_N.numel())
            if buffer is not held.rounds[-1]:
                yield AllReduce(buffer)
        rows = dict(zip(places, lost_TL, strict=True))
        yield Compute("encode", partial(self._note_lost, state, held, rows), whole_N.numel())
        return lost_TL

    def _note_lost(self, state: LadderState, held: StepTensors, rows: dict[int, Tensor]) -> None:
        """The squared norm of a matrix less that of its projection; 0 where it stays dense."""
        last, shapes = held.program.last, state.spec.tensor_shapes
        for m in held.batches:
            other = 2 - last.dims.index("R")  # the dimension that is not R, after B
            kept_BR = torch.linalg.vector_norm(m.factors[last], dim=other, dtype=torch.float64)
            whole_B = torch.linalg.vector_norm(m.whole_BNM, dim=(1, 2), dtype=torch.float64)
            lost_BR = whole_B.square()[:, None] - kept_BR.square().cumsum(1)
            members = range(m.tensors.start, m.tensors.stop)
            for place, lost_R in zip(members, lost_BR.clamp_min_(0.0), strict=True):
                for rung, alone in enumerate(self._alone(shapes[place])):
                    if alone.batches:
                        rows[place][rung] = lost_R[self.ranks[rung] - 1]

    def synchronise(
        self,
        me: Member,
        state: LadderState,
        rungs: Sequence[int],
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        ranks = [1] * len(state.most.basis_T)
        for place, rung in zip(tensor_places(state.spec), rungs, strict=True):
            ranks[place] = self.ranks[rung]
        layout = layout_of(self.program.traced(), state.spec, tuple(ranks))
        forms = zip(state.most.basis_T, layout.basis_shapes, strict=True)
        bases = tuple(basis if len(form) == 1 else basis[:, : form[1]] for basis, form in forms)
        own = MatrixState(layout, bases)
        yield from self.program.synchronise(me, own, grad_N, out_N, residual_N)
        return state

    def _most(self, shape: tuple[int, ...]) -> int:
        """The largest rank with which a tensor is factorised."""
        pairs = zip(self.ranks, self._alone(shape), strict=True)
        return max((rank for rank, alone in pairs if alone.batches), default=1)

    def _alone(self, shape: tuple[int, ...]) -> list[FactorLayout]:
        """The layout of a message of one tensor at each rank."""
        spec = TensorSpec("", prod(shape), shapes=(shape,))
        return [layout_of(self.program.traced(), spec, rank) for rank in self.ranks]
