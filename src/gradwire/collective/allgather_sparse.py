"""All-gather of sparse payloads (AGsparse): every rank adds up every payload.

Source: torch.distributed.all_gather; the scheme ZEN (section 2) calls AGsparse and DGC
uses.
Differences: where payload sizes vary, they are gathered first, and payloads are padded
    to the largest of the step.
Wire: (W-1) * payload bytes a rank (rounded up to 8); where sizes vary, (W-1) * (8 + the
largest).
State: the codec's.
Contributed: the encoded gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Compressor, Layout, Member, Residual, State
from ..contract.collective import Collective, Dimensions, Needs
from ..contract.payload import Payload, slot_bytes
from ..contract.spec import TensorSpec
from ..contract.verbs import AllGather, Compute, Steps
from .steps.ordered_sums import note_union, summing_into
from .steps.sizes import announce_all


@dataclass(frozen=True, kw_only=True)
class allgather_sparse(Collective):
    """All-gather of sparse payloads, merged in rank order."""

    needs: ClassVar[Needs] = Needs(layouts=(Layout.SPARSE, Layout.TRANSFORMED))
    carries_rows: ClassVar[bool] = True
    dimensions: ClassVar[Dimensions] = Dimensions(
        "ring", "one-shot", "centralization", balance=None
    )

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> Steps[State]:
        varies = not codec.traits.exact_size
        codec = me.variant_of(codec)
        form = codec.format(TensorSpec.of(grad_N))
        buffer = me.scratch("own", form.slot_bytes, grad_N, torch.uint8)
        room = buffer[: form.size_bytes]
        payload, state = yield me.encoding(codec, state, grad_N, residual_N, room)
        limits = [form.size_bytes] * me.world
        sizes = yield from announce_all(me, codec, payload.size_bytes, limits)
        slot = slot_bytes(max(sizes))
        gathered = me.scratch(
            "gathered", me.world * slot, grad_N, torch.uint8, varies=varies
        )
        yield AllGather(gathered, buffer[:slot])
        yield Compute(
            "merge",
            lambda: _merge_all(codec, me, sizes, gathered, out_N),
            me.world * grad_N.numel(),
        )
        return state


def _merge_all(
    codec: Compressor, me: Member, sizes: list[int], gathered: Tensor, out_N: Tensor
) -> None:
    spec = TensorSpec.of(out_N)
    forms = {size_bytes: codec.received(spec, size_bytes) for size_bytes in set(sizes)}
    slots = gathered.chunk(me.world)
    payloads = [
        Payload(forms[size], slot[:size])
        for size, slot in zip(sizes, slots, strict=True)
    ]
    with summing_into(me, out_N) as sum_N:
        codec.merge_all(payloads, sum_N, scale=1 / me.world)
    note_union(me, codec, payloads, out_N)


EXAMPLES = (allgather_sparse(),)
