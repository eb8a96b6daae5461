"""demo: the largest cosine coefficients of each chunk of 64 x 64 elements.

Source: Peng, Quesnelle and Kingma, "Decoupled Momentum Optimization", arXiv 2411.19870,
    section 3 (extraction of fast components); its momentum is
    ``gw.with_decoupled_momentum``.
Differences from the paper:
    - A chunk is ``side**2`` adjacent elements of the flat gradient, taken as a matrix,
      so that any collective may cut a gradient. The paper cuts a tensor by divisors of
      its dimensions that are at most 64. Of a matrix with 64 columns both are the same,
      as is a whole row with fewer elements, else rows of a chunk are parts of rows of
      the matrix. The largest of the coefficients hold as much of a small GPT's
      gradients either way.
    - What is left over at a tensor's end is a chunk of its own, with fewer rows, of
      which the same share of coefficients is sent, rounded up. The paper sends as many
      coefficients of small chunks as of whole ones.
    - Values travel in bfloat16 and places in the code of Elias and Fano: 25 bits a
      coefficient with the default settings. The paper's program sends 96.
    - The mean counts a coefficient that a rank did not send as 0. The paper's program
      divides by the number of ranks that sent it, so that coefficients of few ranks
      weigh more.
Default: 32 of 4096 coefficients, the paper's, for long trainings by the mean's sign
    (see ``gw.with_decoupled_momentum``). A coefficient waits for some 100 steps, so
    short trainings by AdamW end far behind dense. 200 steps of a small GPT end 49 %
    behind it; the paper's steps, at the best rate tried for each, 19 %, and with
    ``keep=128`` 4 %.
Wire: elias_fano of the places of all coefficients -> K * itemsize + ceil(K b / 8) +
    ceil((K + floor((L - 1) / 2^b)) / 8) bytes, with K = keep * (N // side**2) of whole
    chunks and their share of the last, of L coefficients, and b = floor(log2((L - 1) /
    K)).
State: none. Contributed: the decoded gradient. The transform is orthonormal, so what is
    lost is no longer than the gradient. An inf or NaN makes all of its chunk so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compress._coo import check_addressable
from gradwire.compress._residual import EncodesMany, as_working
from gradwire.contract import Layout, State, Traits
from gradwire.contract.bounds import check_choice, check_whole
from gradwire.contract.payload import Format, Payload
from gradwire.contract.spec import TensorSpec, spec_of, working_dtype
from gradwire.errors import invalid
from gradwire.kernels.sparse.entries import Entries
from gradwire.kernels.sparse.formats.elias_fano import elias_fano

from . import _cosines as cosines

_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class demo(EncodesMany):
    """Keeps the ``keep`` largest of the ``side**2`` cosine coefficients of each chunk.

    Args:
        side: The side of a chunk, which is a matrix of ``side**2`` adjacent elements: a
            whole number from 4 to 64; default 64. A larger chunk shares its
            coefficients among more elements, and so sends less.
        keep: The coefficients that are sent of each chunk, from 1 to ``side**2``;
            default 32. More of them send more bytes and lose less.
        values: The dtype in which coefficients travel: ``torch.bfloat16`` (the default)
            or ``torch.float32``, which takes 2 bytes more. The rounding error of
            bfloat16 stays in the residual.

    >>> codec = demo(side=4, keep=1)
    >>> ramp = torch.arange(16.0)
    >>> payload, _ = codec.encode(None, ramp + 50)
    >>> codec.decode(payload, torch.empty(16))[:4], payload.size_bytes
    (tensor([57.5000, 57.5000, 57.5000, 57.5000]), 4)
    """

    side: int = 64
    keep: int = 32
    values: torch.dtype = torch.bfloat16
    traits: ClassVar[Traits] = Traits(
        layout=Layout.TRANSFORMED,
        nonexpansive=True,
        error_feedback=True,
        shared_scale=True,
    )

    def __post_init__(self) -> None:
        check_whole("demo side", self.side, "write 64", least=4, most=cosines.MOST_SIDE)
        check_whole("demo keep", self.keep, "write 32", most=self.side**2)
        check_choice("demo values", self.values, _DTYPES)

    def format(self, spec: TensorSpec) -> Format:
        cutting = self._cutting(spec)
        return elias_fano().layout(
            cutting.num_listed, cutting.num_places, dtype=self.values
        )

    def encode_many(
        self,
        states: Sequence[State],
        grads: Sequence[Tensor],
        residuals: Sequence[Tensor | None] | None = None,
        buffers: Sequence[Tensor | None] | None = None,
    ) -> list[tuple[Payload, State]]:
        nothing = [None] * len(grads)
        cuttings = [self._cutting(spec_of(grad_N)) for grad_N in grads]
        whole = [as_working(grad_N) for grad_N in grads]
        pairs = [*zip(whole, [cutting.num_listed for cutting in cuttings], strict=True)]
        places = [grad_N.new_empty(num, dtype=torch.int32) for grad_N, num in pairs]
        values = [grad_N.new_empty(num) for grad_N, num in pairs]
        cosines.encode_many(
            cuttings, whole, places, values, residuals or nothing, wire=self.values
        )
        payloads = [
            elias_fano().encode(
                Entries(places_K, values_K.to(self.values)), cutting.num_places, buffer
            )
            for places_K, values_K, cutting, buffer in zip(
                places, values, cuttings, buffers or nothing, strict=True
            )
        ]
        return list(zip(payloads, states, strict=True))

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        self._decode((payload,), out_N, scale, add=False)
        return out_N

    def merge_all(
        self, payloads: Sequence[Payload], sum_N: Tensor, *, scale: float = 1.0
    ) -> None:
        """Adds coefficients of all payloads up before it transforms them, once."""
        self._decode(payloads, sum_N, scale, add=True)

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        self._decode((payload,), sum_N, scale, add=True)

    def _decode(
        self, payloads: Sequence[Payload], out_N: Tensor, scale: float, *, add: bool
    ) -> None:
        cutting = self._cutting(spec_of(out_N))
        dtype = working_dtype(out_N.dtype)
        count = cutting.num_listed
        places_LK = out_N.new_empty((len(payloads), count), dtype=torch.int32)
        values_LK = out_N.new_empty((len(payloads), count), dtype=dtype)
        for payload, places_K, values_K in zip(
            payloads, places_LK, values_LK, strict=True
        ):
            entries = elias_fano().decode(payload, cutting.num_places, room=places_K)
            values_K.copy_(entries.values)
        whole_N = out_N.to(dtype).contiguous()
        cosines.decode(cutting, places_LK, values_LK, whole_N, scale=scale, add=add)
        if whole_N is not out_N:
            out_N.copy_(whole_N)

    def _cutting(self, spec: TensorSpec) -> cosines.Cutting:
        check_addressable("demo", spec)
        cutting = cosines.Cutting(spec.numel, self.side, self.keep)
        if cutting.num_places > 2**31:  # the last chunk is filled up
            raise invalid(
                "demo gradient",
                f"{spec.numel} elements, {cutting.num_places} when filled up",
                "at most 2**31",
                "cut it into chunks",
            )
        return cutting


EXAMPLES = (demo(), demo(side=8, keep=4, values=torch.float32))
