"""Dense all-reduce: the library's own, with sums of 16-bit values in float32.

Source: torch.distributed.all_reduce; what DDP does by default.
Differences: values of 32 bits and more are divided by the world size before they are
    summed, as DDP does. A library adds values of 16 bits in 16 bits, so its error grows
    with the ranks. Here each rank adds up a chunk of them in float32, in rank order,
    and divides the sum. So a mean has two roundings to 16 bits: of each gradient, and
    of the mean.
Wire: 2(W-1)/W of the payload's ``values`` a rank. Of 32 bits: one AllReduce, where it
    is a ring. Of 16 bits: an all-to-all and an all-gather of W equal chunks; the last
    chunk is filled up. In place of the all-to-all, chunks of more than 64 KiB go to
    one rank after another, by sends and receives.
State: the codec's.
Contributed: the encoded gradient. With 16-bit values, rounding the mean of a chunk
    loses a part, which is the residual of the chunk's rank. Float32 rounding of sums is
    in no rank's residual.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Compressor, Member, Residual, State
from ..contract.collective import Collective, Needs
from ..contract.spec import TensorSpec
from ..contract.verbs import AllReduce, Compute, Steps
from .steps.wide_sums import averaged, is_narrow


class Summing(Collective):
    """Collectives that sum the ``values`` of payloads in their place, by ``sum_up``."""

    needs: ClassVar[Needs] = Needs(additive=True, exact_size=True)

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> Steps[State]:
        codec = me.variant_of(codec)
        spec = TensorSpec.of(grad_N)
        buffer = payload_buffer(codec, me, spec, out_N)
        payload, state = yield me.encoding(codec, state, grad_N, residual_N, buffer)
        yield from self.sum_up(me, payload["values"])
        if buffer.data_ptr() != out_N.data_ptr() or not codec.is_decoded(
            scale=1 / me.world
        ):
            yield Compute(
                "decode",
                lambda: codec.decode(payload, out_N, scale=1 / me.world),
                spec.numel,
            )
        return state

    @abstractmethod
    def sum_up(self, me: Member, values_N: Tensor) -> Steps[None]:
        """Replaces ``values_N`` by its sum over ranks; the same bits on every rank."""


@dataclass(frozen=True, kw_only=True)
class allreduce(Summing):
    """All-reduce of payloads that can be summed.

    Those of 16 bits are summed in float32.
    """

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> Steps[State]:
        spec = TensorSpec.of(grad_N)
        run = averaged if spec.numel and is_narrow(codec, spec) else super().run
        return (yield from run(codec, me, state, grad_N, out_N, residual_N))

    def sum_up(self, me: Member, values_N: Tensor) -> Steps[None]:
        yield AllReduce(values_N)


def payload_buffer(
    codec: Compressor, me: Member, spec: TensorSpec, out_N: Tensor
) -> Tensor:
    """An additive payload's buffer: ``out_N`` itself if it has the payload's layout.

    Then neither encode nor decode moves anything.
    """
    form = codec.format(spec)
    values = form.fields[0]
    if (
        len(form.fields) == 1
        and values.dtype == out_N.dtype
        and values.numel == out_N.numel()
    ):
        return out_N.view(torch.uint8)
    return me.scratch("payload", form.size_bytes, out_N, torch.uint8)


EXAMPLES = (allreduce(),)
