"""Natural sparsity: rows without a gradient are not sent, where that pays.

A gradient of an embedding has values only in the rows that a batch has looked up. Ranks
announce how many rows they have, and all choose alike: the inner exchange, or
rows without loss by the scheme that is fastest for such counts on the links of
``Member.cluster``. Gradients that come as rows (``nn.Embedding(sparse=True)``) are
never made dense: ``RowExchange`` has no inner exchange, and chooses among the schemes
for rows.

Source: ZEN (OSDI 2025), sections 2.1 and 4: "we only apply sparse tensor
    synchronization schemes to gradients from the embedding layers".
Differences: chosen anew in each step, from counts of that step and the growth of the
    last one, so that a gradient may turn dense (tied weights, a large batch) and back.
Wire: 8 (W-1) bytes for counts, then the bytes of the inner exchange or the scheme.
State: the inner exchange's, and the growth: rows of the last sparse mean over rows
    of the rank that had most.
Contributed: all of the gradient where rows are sent, else the same as the inner
    exchange's. Where there is a residual, rows of the sum of both are sent, and then no
    residual is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..collective.steps.rows import average_rows
from ..collective.steps.sizes import announce_count
from ..compress.nonzero import nonzero
from ..contract import (
    Compressor,
    Exchange,
    Layout,
    Member,
    Memory,
    Residual,
    State,
    Traits,
)
from ..contract.collective import Collective
from ..contract.payload import Payload
from ..contract.registry import load
from ..contract.spec import TensorSpec
from ..contract.verbs import Steps
from ..errors import invalid, names_checked
from ..kernels.sparse.entries import as_units, check_width, num_units
from .by_name import exchange_for, is_pair
from .error_feedback import ErrorFeedback, Wrapper
from .pair import PairState, pair
from .sparse_schemes import counted, fastest_scheme, other_way_s, schemes
from .without_data import bytes_of_rank

INNER = "inner"
"""The name of the way in a step in which the inner exchange carries the gradient."""

MOST = 0.5
"""The largest share of a rank's units that may be non-zero in a step that goes by rows.

A gradient with more of them counts as dense.
"""


@dataclass(frozen=True)
class RowExchange(Exchange):
    """Averages gradients that are sparse tensors of rows, without loss, never dense.

    ``grad_N`` is coalesced and in host memory, and ``out_N`` becomes the rows that some
    rank has. Rows take ``collective``, or the scheme that is fastest for the counts of
    a step. State: the growth, as a number; a run that goes on from a checkpoint begins
    without one.
    """

    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE, lossless=True, exact_size=False, host_only=True
    )
    collective: Collective | None = None

    def init(self, spec: TensorSpec, world: int) -> float:
        return 0.0

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        shape = grad_N.shape
        width = shape[1:].numel()
        most = 0

        def choose(counts: list[int]) -> Collective:
            nonlocal most
            most = max(counts)
            if self.collective is not None:
                return self.collective
            at = counted(counts, shape.numel(), width, grad_N.dtype, state, me.cluster)
            best = fastest_scheme(at, schemes(of_rows=True, by_counts=True))
            chosen: Collective = load("collective", best.scheme)()
            return chosen

        rows_R = grad_N.indices()[0]
        values_RC = grad_N.values().reshape(-1, width)
        if me.world > 1:
            rows = rows_R, values_RC
            rows_R, values_RC = yield from average_rows(me, rows, shape[0], choose)
        out_N.data = as_rows(rows_R, values_RC, shape)
        return rows_R.numel() / most if most else state


def as_rows(rows_R: Tensor, values_RC: Tensor, shape: Sequence[int]) -> Tensor:
    """The sparse tensor of ``shape`` with these rows, ascending, without duplicates."""
    values = values_RC.reshape(-1, *shape[1:])
    return torch.sparse_coo_tensor(
        rows_R.unsqueeze(0),
        values,
        list(shape),
        is_coalesced=True,
        check_invariants=False,
    )


class NaturalState(NamedTuple):
    """The growth of the last sparse step, 0 before it, and the inner state."""

    growth_1: Tensor
    inner: State


@dataclass(frozen=True, kw_only=True)
class _counted(nonzero):
    """A ``nonzero`` whose state may be a finished payload, which ``encode`` copies.

    Counting has encoded it already, so that a table is looked through only once in a
    step.
    """

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        if isinstance(state, Payload):
            assert buffer is not None
            content = buffer[: state.size_bytes].copy_(state.content)
            return Payload(state.format, content), None
        return super().encode(None, grad_N, residual_N=residual_N, buffer=buffer)


@dataclass(frozen=True)
class Natural(Wrapper):
    """Sends rows of ``width`` elements where that is faster than the inner exchange.

    ``with_natural_sparsity`` makes it. It leaves the name of a step's way in
    ``Member.way``.
    """

    changes: ClassVar[bool] = True
    is_of_schemes: ClassVar[bool] = True
    decides_by: ClassVar[tuple[str, ...]] = ("growth_1",)

    width: int = 1

    def __post_init__(self) -> None:
        check_width("width", self.width)

    def init(self, spec: TensorSpec, world: int) -> NaturalState:
        return NaturalState(
            torch.zeros(1, dtype=torch.float64), self.inner.init(spec, world)
        )

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        me.way = me.imbalance = None
        if me.world > 1:
            most = num_units(grad_N.numel(), self.width)
            count = partial(self._count, me, grad_N, residual_N)
            own_count, payload = yield me.sized(
                "count", count, grad_N.numel(), lambda: (most, None)
            )
            counts = yield from announce_count(me, own_count, most)
            growth = 0.0 if state.growth_1.is_meta else float(state.growth_1)
            me.way = self._choose(me, counts, growth, grad_N)
        if me.way in (None, INNER):
            inner = yield from me.through(
                self.inner, state.inner, grad_N, out_N, residual_N
            )
            return NaturalState(state.growth_1, inner)
        scheme = pair(_counted(width=self.width), load("collective", me.way)())
        yield from me.through(scheme, PairState((), payload), grad_N, out_N, residual_N)
        arrived = 0 if me.selection is None else me.selection.arrived
        me.selection = None  # nothing was selected: all that is not zero was sent
        if arrived:
            # -0.0 travels, uncounted
            state.growth_1.fill_(arrived / self.width / max(1, *counts))
        return state

    def _count(
        self, me: Member, grad_N: Tensor, residual_N: Residual
    ) -> tuple[int, Payload | None]:
        """The number of this rank's non-zero units, and without residual their payload.

        With a residual units are only counted, as encoding would take the residual
        along.
        """
        if residual_N is not None:
            return count_units(grad_N, residual_N, self.width), None
        codec = nonzero(width=self.width)
        form = codec.format(TensorSpec.of(grad_N))
        room = me.scratch("counted", form.slot_bytes, grad_N, torch.uint8)
        payload, _ = codec.encode(None, grad_N, buffer=room[: form.size_bytes])
        return payload["indices"].numel(), payload

    def _choose(
        self, me: Member, counts: list[int], growth: float, grad_N: Tensor
    ) -> str:
        """The way of a step, from counts that all ranks know: a scheme or ``INNER``."""
        spec = TensorSpec.of(grad_N)
        if not spec.numel or max(counts) > MOST * num_units(spec.numel, self.width):
            return INNER
        sent = bytes_of_rank(self.inner, spec, len(counts))
        if sent is None:
            return INNER
        at = counted(counts, spec.numel, self.width, spec.dtype, growth, me.cluster)
        best = fastest_scheme(at, schemes(by_counts=True)).predictions[0]
        return best.scheme if best.seconds < other_way_s(at, sent) else INNER


def count_units(grad_N: Tensor, residual_N: Tensor, width: int) -> int:
    """The number of units in which the gradient or its residual is not zero."""
    own = as_units(grad_N, width).ne(0).any(1)
    kept = as_units(residual_N, width).ne(0).any(1)
    return int((own | kept).sum())


@names_checked
def with_natural_sparsity(algorithm: Compressor | Exchange, width: int) -> Exchange:
    """Sends only the rows that are not zero, without loss, where that is shorter.

    ``gw.attach`` does this by itself for ``nn.Embedding(sparse=True)``.

    Args:
        algorithm: A compressor, or a pair with or without error feedback.
        width: The number of elements in a row.

    Returns:
        The exchange. Error feedback stays outermost.

    Raises:
        InvalidSetting: Another kind of exchange was given.

    >>> from gradwire.compress.none import none
    >>> from gradwire.exchange.by_name import run_local
    >>> table = torch.zeros(2, 1000, 8)
    >>> table[0, 3], table[1, 7] = 2.0, 4.0
    >>> mean = run_local(with_natural_sparsity(none(), 8), list(table.flatten(1)))[1][0]
    >>> mean.view(1000, 8)[[3, 7, 8], 0]
    tensor([1., 2., 0.])
    """
    made = exchange_for(algorithm)
    if not is_pair(made):
        raise invalid(
            "algorithm",
            algorithm,
            "a compressor, or a pair with or without error feedback",
            "wrap the pair first, then wrap around it",
        )
    if isinstance(made, ErrorFeedback):
        return ErrorFeedback(Natural(made.inner, width))
    return Natural(made, width)
