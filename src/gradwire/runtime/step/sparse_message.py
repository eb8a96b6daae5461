"""The message of one parameter whose gradient is row-sparse (``nn.Embedding(sparse=True)``).

Its rows take the collective that the user's exchange or plan names. Where it names none that
carries rows, the way is decided in every step, from the counts of all ranks and from how many rows
the last mean had. All ranks know these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ...collective.steps.rows import average_rows
from ...contract import Exchange, Member
from ...contract.collective import Collective
from ...contract.registry import load
from ...contract.verbs import Compute, Steps
from ...exchange.sparse_schemes import counted, fastest_scheme, schemes
from ..device.devices import HOST
from ..device.streams import Copying
from .messages import Grads


class SparseMessage:
    """Averages one sparse gradient without loss; the mean replaces it in the step's gradients.

    ``exchange`` is None, as rows travel as they are. ``collective`` is their way where one is
    named. ``after`` is the same as in ``Message``.
    """

    exchange: Exchange | None = None
    device = HOST
    """Rows are found, and added up, on the host."""

    def __init__(
        self,
        index: int,
        name: str,
        param: Tensor,
        rank: int,
        world: int,
        *,
        collective: Collective | None = None,
        after: Sequence[int] = (),
    ) -> None:
        self.index, self.name, self.after = index, name, tuple(after)
        self._collective = collective
        self._shape, self._dtype = param.shape, param.dtype
        self.member = Member(rank, world)
        self._width = self._shape[1:].numel()
        self._growth, self._most = 0.0, 0
        self._mean: Tensor | None = None
        self._arrived: tuple[Tensor, Tensor] | None = None

    @property
    def names(self) -> list[str]:
        return [self.name]

    @property
    def mean(self) -> Tensor:
        """The averaged gradient of the last step, sparse COO and coalesced."""
        assert self._mean is not None
        return self._mean

    @property
    def is_finite(self) -> bool:
        """Whether the mean of the last step has neither inf nor NaN."""
        return bool(self.mean.values().isfinite().all())

    def text(self, grads: Grads, copying: Copying = nullcontext) -> Steps[None]:
        rows, values = yield Compute("gather", lambda: self._rows(grads[self.name], copying))
        if self.member.world > 1:
            rows, values = yield from average_rows(
                self.member, (rows, values), self._shape[0], self._choose
            )
            if self.member.way is not None:
                self._growth = rows.numel() / self._most
        self._arrived = rows, values

    def _choose(self, counts: list[int]) -> Collective:
        """The collective of a step, from counts that all ranks know."""
        self._most = max(counts)
        if self._collective is not None:
            return self._collective
        numel = self._shape.numel()
        at = counted(counts, numel, self._width, self._dtype, self._growth)
        best = fastest_scheme(at, schemes(of_rows=True, by_counts=True))
        chosen: Collective = load("collective", best.scheme)()
        return chosen

    def _rows(self, grad: Tensor | None, copying: Copying) -> tuple[Tensor, Tensor]:
        """Row numbers (ascending, no duplicates) and values, on the host."""
        width = self._width
        if grad is None:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, width, dtype=self._dtype)
        with copying():
            sparse = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
            values = sparse.values().reshape(-1, width)
            return sparse.indices()[0].cpu().contiguous(), values.cpu().contiguous()

    @torch.no_grad()
    def scatter(self, grads: Grads, copying: Copying = nullcontext) -> None:
        """Makes the mean of the rows that arrived, and puts it in the gradient's place."""
        assert self._arrived is not None
        rows, values = self._arrived
        values = values.reshape(-1, *self._shape[1:])
        self._mean = torch.sparse_coo_tensor(
            rows.unsqueeze(0), values, self._shape, is_coalesced=True, check_invariants=False
        )
        grad = grads[self.name]
        with copying():
            if grad is not None and not grad.is_sparse:
                grad.zero_().index_copy_(0, rows.to(grad.device), values.to(grad.device))
            elif grad is not None:
                grads[self.name] = self._mean.to(grad.device)
