"""topk: the k elements of largest magnitude, exactly.

Source: Aji and Heafield, EMNLP 2017 (gradient dropping by magnitude); ZEN and DEFT call
it Top-k.
Differences: ties go to the lowest index, and NaN ranks above infinity above all
    numbers. So the bits alone decide which elements are kept.
Default: density 0.01 is the literature's, for long trainings. With it the first 400
    steps of a small GPT end 37 to 40 % behind dense, as an element waits for 100 steps
    (docs/measured.md). Under SGD 200 steps of three tasks end 5 to 25 % behind.
    ``with_density_warmup`` lowers 25 to 9 %, and 18 to 13 %
    (``gradwire bench train --optimizer sgd --only topk --only topk-warmup``).
Density: as asked, to the element.
Wire: indices_K int32 ascending, values_K -> (4 + itemsize) * K bytes, K = max(1,
round(density * N)). State: none. Contributed: the kept elements (rounded, if values are
sent in 16 bits).

Not in CompLL's language: where the k-th magnitude lies depends on all elements, so an
exact cut is no pass over blocks. ``kernels/select`` guesses it from a sample and proves
the guess with the same read that collects the candidates. The language's ``top`` cuts
elements that a threshold has let pass. Without a threshold it takes 34 ms for 8 M
float32 in one thread, ``kernels/select`` 5.9 ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Layout, State, Traits
from ..contract.bounds import check_choice, check_share
from ..contract.payload import Format, Payload
from ..contract.spec import TensorSpec, spec_of
from ..kernels import select
from ._coo import Coo, check_addressable, coo_format, round_to_wire, share_of
from ._residual import EncodesMany, as_working

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class topk(EncodesMany, Coo):
    """Keeps the ``density`` share of elements with the largest magnitude.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger fraction sends
            more bytes, and elements wait for fewer steps.
        values: The dtype in which values travel: ``torch.float32`` (the default),
            ``torch.bfloat16`` or ``torch.float16``. A 16-bit dtype makes an element 6
            bytes in place of 8. Its rounding error stays in the residual.

    >>> codec = topk(density=0.5)
    >>> payload, _ = codec.encode(None, torch.tensor([1.0, -4.0, 2.0, 3.0]))
    >>> payload["indices"], codec.decode(payload, torch.empty(4))
    (tensor([1, 3], dtype=torch.int32), tensor([ 0., -4.,  0.,  3.]))
    """

    density: float = 0.01
    values: torch.dtype = torch.float32
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE,
        nonexpansive=True,
        error_feedback=True,
        density_range=(1.0, 1.0),
    )

    def __post_init__(self) -> None:
        check_share("topk density", self.density)
        check_choice("topk values", self.values, _DTYPES)

    def kept(self, numel: int) -> int:
        """The number of kept elements of ``numel``, at least one unless it is 0."""
        return share_of(self.density, numel)

    def format(self, spec: TensorSpec) -> Format:
        check_addressable("topk", spec)
        return coo_format(self.kept(spec.numel), self.values)

    def encode_many(
        self,
        states: Sequence[State],
        grads: Sequence[Tensor],
        residuals: Sequence[Tensor | None] | None = None,
        buffers: Sequence[Tensor | None] | None = None,
    ) -> list[tuple[Payload, State]]:
        nothing = [None] * len(grads)
        residuals = residuals or nothing
        buffers = buffers or nothing
        payloads = [
            Payload.empty(self.format(spec_of(grad_N)), buffer, grad_N.device)
            for grad_N, buffer in zip(grads, buffers, strict=True)
        ]
        whole = [as_working(grad_N) for grad_N in grads]
        indices = [payload["indices"] for payload in payloads]
        values = [payload["values"] for payload in payloads]
        exact = [
            values_K
            if values_K.dtype == whole_N.dtype
            else torch.empty_like(values_K, dtype=whole_N.dtype)
            for values_K, whole_N in zip(values, whole, strict=True)
        ]
        select.topk_many(whole, indices, exact, residuals)
        for values_K, exact_K, indices_K, residual_N in zip(
            values, exact, indices, residuals, strict=True
        ):
            if exact_K is not values_K:
                round_to_wire(values_K, exact_K, indices_K, residual_N)
        return list(zip(payloads, states, strict=True))


EXAMPLES = (
    topk(),
    topk(density=0.3),
    topk(density=1.0),
    topk(density=0.3, values=torch.bfloat16),
)
