"""An exchange of every program of matrices, which torch carries out (``factors``)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, dataclass_transform

import torch
from torch import Tensor

from ..bounds import MOST_SEED, check_whole
from ..contract import Exchange, Layout, Member, State, Traits, synchronise_alone
from ..spec import TensorSpec, working_dtype
from ..travel import bytes_sent
from ..verbs import AllReduce, Compute, Steps
from .factors import MatrixState, StepTensors, layout_of
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
        layout = layout_of(self.traced(), spec, self.rank)
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

    def wire_bytes(self, spec: TensorSpec, world: int) -> list[int]:
        layout = layout_of(self.traced(), spec, self.rank)
        item = working_dtype(spec.dtype).itemsize
        sizes = (item * numel for numel in layout.round_numels)
        return [sum(bytes_sent("all_reduce", size, world) for size in sizes)] * world


@lru_cache(maxsize=1024)
def _traced(program: MatrixProgram) -> LowRank:
    return trace_matrices(program)
