"""All-gather of sparse payloads (AGsparse): every rank gets every payload and adds them up.

Source: torch.distributed.all_gather; the scheme ZEN (section 2) calls AGsparse and DGC uses.
Differences: none; payloads are of one size, known to all, so none is sent.
Wire: (W-1) * payload bytes a rank (rounded up to 8).
State: the codec's.
Contributed: what the codec encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Compressor, Layout, Member, State
from ..payload import Format, Payload
from ..spec import TensorSpec, working_dtype
from ._types import Collective, Needs
from ._verbs import AllGather, Compute, Steps


@dataclass(frozen=True, kw_only=True)
class allgather_sparse(Collective):
    """All-gather of sparse payloads, merged in rank order."""

    needs: ClassVar[Needs] = Needs(layout=Layout.SPARSE, exact_size=True)

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        codec = codec.for_world(me.world)
        form = codec.format(TensorSpec("", grad_N.numel(), grad_N.dtype))
        own = me.scratch("own", form.slot_bytes, grad_N, torch.uint8)
        gathered = me.scratch("gathered", me.world * form.slot_bytes, grad_N, torch.uint8)
        _, state = yield Compute(
            "encode",
            lambda: codec.encode(
                state, grad_N, residual_N=residual_N, buffer=own[: form.size_bytes]
            ),
            grad_N.numel(),
        )
        yield AllGather(gathered, own)
        yield Compute(
            "merge", lambda: _merge_all(codec, me, form, gathered, out_N), me.world * grad_N.numel()
        )
        return state

    def wire_bytes(self, codec: Compressor, spec: TensorSpec, world: int) -> list[int]:
        return [(world - 1) * codec.for_world(world).format(spec).slot_bytes] * world


def _merge_all(
    codec: Compressor, me: Member, form: Format, gathered: Tensor, out_N: Tensor
) -> None:
    dtype = working_dtype(out_N.dtype)
    sum_N = out_N if out_N.dtype == dtype else me.scratch("sum", out_N.numel(), out_N, dtype)
    sum_N.zero_()
    for rank in range(me.world):
        at = rank * form.slot_bytes
        payload = Payload(form, gathered[at : at + form.size_bytes])
        codec.merge(payload, sum_N, scale=1 / me.world)
    if sum_N is not out_N:
        out_N.copy_(sum_N)


EXAMPLES = (allgather_sparse(),)
