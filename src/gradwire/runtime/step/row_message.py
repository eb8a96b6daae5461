"""The message of one parameter whose gradient is row-sparse."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from ...contract.collective import Collective
from ...exchange.natural import RowExchange, as_rows
from ..device.streams import Copying
from .buffer import GradientBuffer, Grads
from .layout import ParamRange
from .messages import Message, Placement


class RowBuffer(GradientBuffer):
    """A buffer that is a sparse tensor of rows, in host memory."""

    is_of_rows = True

    @cached_property
    def flat_N(self) -> Tensor:
        """The rows of this step; without a gradient there are none."""
        shape = self._spec.shapes[0]
        values = torch.zeros(0, *shape[1:], dtype=self._spec.dtype, device="cpu")
        return as_rows(torch.zeros(0, dtype=torch.int64, device="cpu"), values, shape)

    @property
    def size_bytes(self) -> int:
        held = vars(self).get("flat_N")
        return 0 if held is None else held.indices().nbytes + held.values().nbytes

    def can_borrow(self, grads: Grads) -> bool:
        return False

    def gather(
        self, places: Sequence[int], grads: Grads, copying: Copying
    ) -> list[int]:
        self._drop()
        grad = grads[self._names[0]]
        if grad is not None:
            with copying():
                found = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
                rows = found.indices()[0].cpu()
                values = found.values().cpu()
                self.flat_N = as_rows(rows, values, found.shape)
        return []

    @torch.no_grad()
    def scatter(self, grads: Grads, copying: Copying = nullcontext) -> None:
        grad = grads[self._names[0]]
        if grad is None:
            return
        with copying():
            mean = self.flat_N.to(grad.device)
            if grad.is_sparse:
                grad.data = mean
            else:
                grad.zero_().index_copy_(0, mean.indices()[0], mean.values())
        self._drop()

    def put_mean(self, name: str, into: Tensor) -> Tensor:
        return self.flat_N.to(into.device)

    def norms(self) -> list[float]:
        return []

    def _drop(self) -> None:
        vars(self).pop("flat_N", None)


class RowMessage(Message):
    """A message of rows; only its exchange and its buffer are others.

    ``collective`` is the way of the rows, where one is named.
    """

    kind_of_buffer = RowBuffer

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
