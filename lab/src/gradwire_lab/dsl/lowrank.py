"""An exchange of every program of matrices, which torch carries out.

Letters: T tensors, B adjacent matrices of one shape and rank, R columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod
from typing import Any, ClassVar, NamedTuple, dataclass_transform

import torch
from torch import Tensor

from gradwire.compress.powersgd import (
    FactorStep,
    as_matrix,
    first_bases,
    orthonormal,
    powersgd,
)
from gradwire.contract import (
    Exchange,
    Member,
    Residual,
    State,
    Traits,
    synchronise_alone,
)
from gradwire.contract.bounds import MOST_SEED, check_whole
from gradwire.contract.spec import TensorSpec, clear_not_finite
from gradwire.contract.verbs import Steps

from .matrices import Factor, LowRank, Matrix, Operand, decomp, matmul, trace_matrices

# ---- A step of a program of matrices in torch, and where its matrices and factors lie
#
# Letters: T tensors of a message, B adjacent ones of one shape and rank; a matrix has N
# rows (n, the tensor's first dimension) and M columns (m, all its others), its factors
# have R columns.


class FactorPlace(NamedTuple):
    """Where a batch's matrices of one factor lie in a buffer, and their shape."""

    range: slice
    shape_BNM: tuple[int, int, int]


class ProgramBatch(NamedTuple):
    """Adjacent matrices of one shape and rank: which tensors they are, where all
    lies.
    """

    tensors: slice
    whole: FactorPlace
    start: FactorPlace
    products: tuple[FactorPlace, ...]


@dataclass(frozen=True)
class ProgramLayout:
    """The places of everything in a message's gradient and in the buffers of its
    all-reduces.

    The first holds, in the order of the tensors, what stays dense and every batch's
    products, the others every batch's of their round. ``dense`` are ranges of the
    gradient and of the first.
    """

    basis_shapes: tuple[tuple[int, ...], ...]
    dense: tuple[tuple[slice, slice], ...]
    batches: tuple[ProgramBatch, ...]
    round_numels: tuple[int, ...]
    start_numel: int


class ProgramState(NamedTuple):
    """The layout of a message, which follows from the spec, and every tensor's next
    start.
    """

    layout: ProgramLayout
    basis_T: tuple[Tensor, ...]


@lru_cache(maxsize=4096)
def layout_of(program: LowRank, spec: TensorSpec, rank: int) -> ProgramLayout:
    """The layout of what a message carries; a spec without shapes is one vector, and
    dense.
    """
    shapes = spec.tensor_shapes
    forms = [_form(program, shape, rank) for shape in shapes]
    ends = [0, *accumulate(map(prod, shapes))]
    dense: list[tuple[slice, slice]] = []
    batches: list[ProgramBatch] = []
    used = [0 for _ in program.rounds]
    started = 0
    for form, run in groupby(range(len(shapes)), key=forms.__getitem__):
        members = list(run)
        tensors = slice(members[0], members[-1] + 1)
        whole = slice(ends[tensors.start], ends[tensors.stop])
        if form is None:
            numel = whole.stop - whole.start
            place = slice(used[0], used[0] + numel)
            dense.append((whole, place))
            used[0] = place.stop
            continue
        places = []
        for product in program.products:
            number = product.round - 1
            factor = _placed(used[number], len(members), form, product.dims)
            places.append(factor)
            used[number] = factor.range.stop
        start = _placed(started, len(members), form, program.start.dims)
        started = start.range.stop
        shape_BNM = (len(members), form["N"], form["M"])
        gradient = FactorPlace(whole, shape_BNM)
        batches.append(ProgramBatch(tensors, gradient, start, tuple(places)))
    basis_shapes = tuple(
        (0,) if form is None else (form["M"], form["R"]) for form in forms
    )
    return ProgramLayout(
        basis_shapes, tuple(dense), tuple(batches), tuple(used), started
    )


def _form(program: LowRank, shape: Sequence[int], rank: int) -> dict[str, int] | None:
    """The dimensions by their letters, if what travels is shorter than the tensor; else
    None.
    """
    rows, columns = as_matrix(shape)
    form = {"N": rows, "M": columns, "R": rank}
    sent = sum(form[p.dims[0]] * form[p.dims[1]] for p in program.products)
    if sent < rows * columns:
        return form
    return None


def _placed(first: int, count: int, form: dict[str, int], dims: str) -> FactorPlace:
    rows, columns = (form[letter] for letter in dims)
    numel = count * rows * columns
    elements = slice(first, first + numel)
    return FactorPlace(elements, (count, rows, columns))


# ---- a step --------------------------------------------------------------------------


class BatchTensors:
    """Views of one batch: every factor, the own part of the last, and the mean."""

    def __init__(self, tensors: StepTensors, batch: ProgramBatch) -> None:
        program = tensors.program
        self.tensors = batch.tensors

        def view(buffer: Tensor, place: FactorPlace) -> Tensor:
            return buffer[place.range].view(place.shape_BNM)

        self.whole_BNM = view(tensors.whole_N, batch.whole)
        self.mean_BNM = view(tensors.mean_N, batch.whole)
        self.factors: dict[Factor, Tensor] = {
            program.gradient: self.whole_BNM,
            program.start: view(tensors.start, batch.start),
        }
        for product, place in zip(program.products, batch.products, strict=True):
            self.factors[product] = view(tensors.rounds[product.round - 1], place)
            if product is program.last:
                self.own = view(tensors.own, place)
        for round_ in program.rounds:
            for basis in round_.bases:
                source = basis.sources[0]
                self.factors[basis] = self.factors[source.factor]

    def operand(self, operand: Operand) -> Tensor:
        """The factor, or a view of its transpose."""
        factor = self.factors[operand.factor]
        if operand.turned:
            return factor.mT
        return factor


class StepTensors(FactorStep):
    """One rank's tensors during a step of a program."""

    def __init__(
        self,
        me: Member,
        program: LowRank,
        state: ProgramState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> None:
        super().__init__(me, state, grad_N, out_N, residual_N)
        self.program = program
        self.start = self.scratch("start", self.layout.start_numel)
        last = self.rounds[-1]
        if residual_N is None:
            self.own = last
        else:
            self.own = self.scratch("own", last.numel())
        self.batches = [BatchTensors(self, batch) for batch in self.layout.batches]

    def encode(self, number: int) -> None:
        """Makes what travels in a round."""
        if number == 0:
            self.gather()
            for m in self.batches:
                starts = list(m.factors[self.program.start])
                torch._foreach_copy_(starts, list(self.basis_T[m.tensors]))
        else:
            self._make_means(number - 1)
        made = self.program.rounds[number]
        for m in self.batches:
            for basis in made.bases:
                orthonormal(m.operand(basis.sources[0]), m.factors[basis])
            for product in made.products:
                left, right = map(m.operand, product.sources)
                torch.bmm(left, right, out=m.factors[product])
        if number == len(self.rounds) - 1 and self.own is not self.rounds[-1]:
            self.own.copy_(self.rounds[-1])  # the residual is worked out from it

    def _make_means(self, number: int) -> None:
        """Divides the sums of a round by W, where more than their directions count."""
        needed = [
            p
            for p in self.program.rounds[number].products
            if self.program.needs_mean(p)
        ]
        if number and needed:
            self.rounds[number].mul_(1 / self.world)
            return
        for m in self.batches:  # beside what is dense, which is a mean already
            for product in needed:
                m.factors[product].mul_(1 / self.world)

    def decode(self) -> None:
        """Takes the own part off the residual, writes the mean, and keeps the next
        start.

        In this order, as the means may be written where the gradient was.
        """
        self._make_means(len(self.rounds) - 1)
        left, right = self.program.result
        if self.residual_N is not None:
            for m in self.batches:
                sent = {**m.factors, self.program.last: m.own}
                sides = (
                    sent[f].mT if turned else sent[f] for f, turned in (left, right)
                )
                m.whole_BNM.baddbmm_(*sides, alpha=-1)
            clear_not_finite(self.residual_N)
        for m in self.batches:
            torch.bmm(m.operand(left), m.operand(right), out=m.mean_BNM)
        self.give()
        for m in self.batches:
            self.keep(m.tensors, m.factors[self.program.kept])


# ---- the exchange --------------------------------------------------------------------


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class MatrixProgram(Exchange):
    """Base of exchanges that are programs of matrices; see ``matrices``.

    ``rank`` is R, the columns of ``start``, a whole number from 1; ``seed`` draws the
    start of the first step. A tensor is factorised where what travels of it is shorter
    than it is; others stay dense. The start's columns are scaled to a largest element
    of 1 between steps.

    >>> from gradwire_lab.dsl.matrices import decomp, matmul
    >>> class twice(MatrixProgram):
    ...     "Two steps of subspace iteration in each step of training."
    ...
    ...     def encode(self, gradient, start):
    ...         return decomp(gradient, decomp(gradient, start)[1])
    ...
    ...     def decode(self, left, right):
    ...         return matmul(left, right.T)
    >>> from gradwire.exchange.without_data import wire_bytes
    >>> wire_bytes(twice(rank=2), TensorSpec("w", 300, shapes=((10, 30),)), 2)
    [640, 640]
    """

    rank: int = 4
    seed: int = 0
    traits: ClassVar[Traits] = powersgd.traits

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

    def init(self, spec: TensorSpec, world: int) -> ProgramState:
        layout = layout_of(self.traced(), spec, self.rank)
        return ProgramState(
            layout, first_bases(layout.basis_shapes, self.seed, spec.dtype)
        )

    def synchronise(
        self,
        me: Member,
        state: ProgramState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        if me.world == 1:
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        step = StepTensors(me, self.traced(), state, grad_N, out_N, residual_N)
        yield from step.steps()
        return state


@lru_cache(maxsize=1024)
def _traced(program: MatrixProgram) -> LowRank:
    return trace_matrices(program)


class low_rank(MatrixProgram):
    """``powersgd`` as a program: every matrix as P Q^T, by one step of subspace
    iteration.
    """

    def encode(self, gradient: Matrix, start: Matrix) -> tuple[Matrix, Matrix]:
        return decomp(gradient, start)

    def decode(self, left: Matrix, right: Matrix) -> Matrix:
        return matmul(left, right.T)
