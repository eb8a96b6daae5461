"""nonzero: everything that is not zero: sparse gradients without loss.

Source: the sparse tensors of ZEN (OSDI 2025), definition 2; embeddings have such
gradients.
Differences: zero is what has no bit set, so that what is decoded has the very bits:
    -0.0 is sent, as NaN and the infinities are. What travels is units of ``width``
    adjacent elements, as rows of an embedding table, each with one index; a unit is
    sent if any element of it is not zero.
Wire: indices_K int32 ascending, values K * width in the gradient's dtype, aligned to
    their size -> (4 + width * itemsize) * K bytes (and up to 4 for float64), K units of
    at most ceil(N / width). A short last unit is filled up with zeros.
State: none. Contributed: the gradient (of a sum with a residual, what its dtype can
hold of it).

Not in CompLL's language, whose filters look at single elements and whose kept values
are float32.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Compressor, Layout, Memory, Residual, State, Traits
from ..contract.bounds import check_number
from ..contract.payload import Field, Format, Payload
from ..contract.spec import TensorSpec, spec_of
from ..kernels import select
from ..kernels.nonzero import nonzero_units as kept_units
from ..kernels.sparse.entries import Entries, Part, check_width
from ..kernels.sparse.scatter import scatter_entries
from ._residual import subtract_sent


@dataclass(frozen=True, kw_only=True)
class nonzero(Compressor):
    """Sends all units of ``width`` elements that are not zero.

    Args:
        width: The number of adjacent elements in a unit, from 1 to 2**24; default 1. A
            unit has one index of 4 bytes. Use the row length for an embedding's table.
        expected_density: The share of units that is expected to be sent, in [0, 1];
            default 1. Predictions count with it. It does not change what is sent.

    >>> codec = nonzero()
    >>> payload, _ = codec.encode(None, torch.tensor([0.0, -4.0, 0.0, 3.0]))
    >>> payload["indices"], codec.decode(payload, torch.empty(4))
    (tensor([1, 3], dtype=torch.int32), tensor([ 0., -4.,  0.,  3.]))
    """

    width: int = 1
    expected_density: float = 1.0
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE,
        lossless=True,
        exact_size=False,
        unbiased=True,
        nonexpansive=True,
    )

    def __post_init__(self) -> None:
        check_width("nonzero width", self.width)
        what = "nonzero expected_density"
        accepted = "a share of the units, in [0, 1]"
        check_number(what, self.expected_density, accepted, "leave it out", 0, 1)

    def holding(self, spec: TensorSpec, num_kept: int) -> Format:
        """The layout of a payload of so many units."""
        values = Field("values", spec.dtype, num_kept * self.width)
        return Format((Field("indices", torch.int32, num_kept), values))

    def format(self, spec: TensorSpec) -> Format:
        return self.holding(spec, self._num_units(spec))

    def typical(self, spec: TensorSpec) -> Format:
        return self.holding(spec, round(self.expected_density * self._num_units(spec)))

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        num_kept = size_bytes // (4 + self.width * spec.dtype.itemsize)
        if 0 <= num_kept <= self._num_units(spec):
            form = self.holding(spec, num_kept)
            if form.size_bytes == size_bytes:
                return form
        raise self.no_such_size(spec, size_bytes)

    def _num_units(self, spec: TensorSpec) -> int:
        return -(-spec.numel // self.width)

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        spec = spec_of(grad_N)
        room = buffer
        if room is None:
            size_bytes = self.format(spec).size_bytes
            room = torch.empty(size_bytes, dtype=torch.uint8, device=grad_N.device)
        num_kept = self._fill(room, grad_N.contiguous(), residual_N)
        form = self.holding(spec, num_kept)
        content = room[: form.size_bytes]
        return Payload(form, content if buffer is not None else content.clone()), state

    def _fill(self, room: Tensor, grad_N: Tensor, residual_N: Residual) -> int:
        if residual_N is None or residual_N.dtype == grad_N.dtype:
            return kept_units(grad_N, room, self.width, residual_N)
        sent_N = residual_N.add_(grad_N).to(grad_N.dtype)
        subtract_sent(residual_N, sent_N.to(residual_N.dtype))
        return kept_units(sent_N, room, self.width)

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        num_units = -(-out_N.numel() // self.width)
        entries = self._entries(payload)
        if scale == 1.0 and out_N.dtype == payload["values"].dtype:
            # NaN's bits as they are
            entries = entries._replace(values=payload["values"])
        scatter_entries(entries, Part(num_units), out_N.zero_(), scale)
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        indices_K, values, width = self._entries(payload)
        if values.dtype != sum_N.dtype:
            # Scaled before it is rounded: a sum may lie beyond float16 where the mean
            # does not.
            values = (values * scale).to(sum_N.dtype)
            scale = 1.0
        select.scatter_add(indices_K, values, sum_N, scale, width)

    def _entries(self, payload: Payload) -> Entries:
        return Entries(*self.entries(payload), self.width)


EXAMPLES = (nonzero(), nonzero(width=7))
