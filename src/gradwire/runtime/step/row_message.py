"""The message of one parameter whose gradient is row-sparse."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from ...contract.collective import Collective
from ...exchange.natural import RowExchange, as_rows
from ..device.streams import Copying
from .messages import Grads, Message, ParamRange, Placement


class RowMessage(Message):
    """A message whose buffer is a sparse tensor of rows, in host memory.

    Only the exchange and the buffer are others than those of any message.
    ``collective`` is the way of the rows, where one is named.
    """

    is_of_rows = True

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
        ranges = [ParamRange.whole(name, param)]
        exchange = RowExchange(collective)
        super().__init__(index, ranges, exchange, rank, world, Placement(after=after))
        self.slots = []  # it has no range of a flat buffer

    @cached_property
    def flat_N(self) -> Tensor:
        """The rows of this step; without a gradient there are none."""
        shape = self.spec.shapes[0]
        values = torch.zeros(0, *shape[1:], dtype=self.spec.dtype, device="cpu")
        return as_rows(torch.zeros(0, dtype=torch.int64, device="cpu"), values, shape)

    @property
    def buffer_bytes(self) -> int:
        held = vars(self).get("flat_N")
        return 0 if held is None else held.indices().nbytes + held.values().nbytes

    def _gather(self, grads: Grads, copying: Copying) -> None:
        self._drop()
        grad = grads[self.names[0]]
        if grad is not None:
            with copying():
                found = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
                rows = found.indices()[0].cpu()
                values = found.values().cpu()
                self.flat_N = as_rows(rows, values, found.shape)

    @torch.no_grad()
    def scatter(self, grads: Grads, copying: Copying = nullcontext) -> None:
        grad = grads[self.names[0]]
        if grad is None:
            return
        with copying():
            mean = self.flat_N.to(grad.device)
            if grad.is_sparse:
                grad.data = mean
            else:
                grad.zero_().index_copy_(0, mean.indices()[0], mean.values())
        self._drop()

    def _drop(self) -> None:
        vars(self).pop("flat_N", None)
