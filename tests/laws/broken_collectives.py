"""Deliberately wrong collectives: one sound one, ``gathers``, and what can be wrong
with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.collective.allreduce import Summing
from gradwire.collective.casync_ps import casync_ps
from gradwire.contract import Compressor, Member, State
from gradwire.contract.collective import Collective, Needs
from gradwire.contract.payload import Format, Payload
from gradwire.contract.spec import TensorSpec, chunk_bounds, working_dtype
from gradwire.contract.verbs import (
    AllGather,
    AllReduce,
    Broadcast,
    Compute,
    Recv,
    Send,
    Steps,
)
from gradwire_lab.collective.casync_ring import casync_ring


@dataclass(frozen=True, kw_only=True)
class gathers(Collective):
    """Sound: every rank gets every payload, and merges them in rank order. The others
    break it.
    """

    needs: ClassVar[Needs] = Needs(exact_size=True)

    def run(self, codec, me, state, grad_N, out_N, residual_N):
        codec = me.variant_of(codec)
        form = codec.format(TensorSpec("", grad_N.numel(), grad_N.dtype))
        own = me.scratch("own", form.slot_bytes, grad_N, torch.uint8)
        everyone = me.scratch(
            "everyone", me.world * form.slot_bytes, grad_N, torch.uint8
        )

        def encode() -> tuple[Payload, State]:
            self.before_encode(me, grad_N, out_N)
            return codec.encode(
                state, grad_N, residual_N=residual_N, buffer=own[: form.size_bytes]
            )

        _, new = yield Compute("encode", encode, grad_N.numel())
        yield from self.talk(me, grad_N, own, everyone)
        yield Compute(
            "merge",
            lambda: self.merge(codec, me, form, everyone, out_N),
            grad_N.numel(),
        )
        return new

    def before_encode(self, me: Member, grad_N: Tensor, out_N: Tensor) -> None:
        """Nothing."""

    def talk(
        self, me: Member, grad_N: Tensor, own: Tensor, everyone: Tensor
    ) -> Steps[None]:
        yield AllGather(everyone, own)

    def order(self, me: Member) -> Iterable[int]:
        return range(me.world)

    def start(self, me: Member, out_N: Tensor) -> Tensor:
        """Where payloads are summed."""
        return torch.zeros(out_N.numel(), dtype=working_dtype(out_N.dtype))

    def merge(
        self,
        codec: Compressor,
        me: Member,
        form: Format,
        everyone: Tensor,
        out_N: Tensor,
    ) -> None:
        sum_N = self.start(me, out_N)
        for rank in self.order(me):
            at = rank * form.slot_bytes
            codec.merge(Payload(form, everyone[at : at + form.size_bytes]), sum_N)
        out_N.copy_(sum_N.mul_(1 / me.world))


class forgets_a_rank(gathers):
    """Leaves the last rank out of the sum."""

    def order(self, me: Member) -> Iterable[int]:
        return range(me.world - 1)


class starts_with_itself(gathers):
    """Sums from the own payload on, so that every rank rounds in another order."""

    def order(self, me: Member) -> Iterable[int]:
        return ((me.rank + i) % me.world for i in range(me.world))


class first_come_first_summed(gathers):
    """Sums in the order in which ranks happened to encode."""

    arrivals: ClassVar[list[int]] = []

    def before_encode(self, me: Member, grad_N: Tensor, out_N: Tensor) -> None:
        self.arrivals.append(me.rank)

    def order(self, me: Member) -> Iterable[int]:
        return self.arrivals[-me.world :]


class gathers_again(gathers):
    """Sends everything once more where there are values."""

    def talk(
        self, me: Member, grad_N: Tensor, own: Tensor, everyone: Tensor
    ) -> Steps[None]:
        yield AllGather(everyone, own)
        if not own.is_meta:
            yield AllGather(everyone, own)


class sends_before_it_receives(gathers):
    """A ring in which every rank sends first, and none receives."""

    def talk(
        self, me: Member, grad_N: Tensor, own: Tensor, everyone: Tensor
    ) -> Steps[None]:
        slots = everyone.view(me.world, -1)
        slots[me.rank].copy_(own)
        for step in range(me.world - 1):
            yield Send((me.rank + 1) % me.world, slots[(me.rank - step) % me.world])
            yield Recv((me.rank - 1) % me.world, slots[(me.rank - step - 1) % me.world])


class announces_zeros(gathers):
    """Tells the others when its gradient is zero: a verb more, depending on values."""

    def talk(
        self, me: Member, grad_N: Tensor, own: Tensor, everyone: Tensor
    ) -> Steps[None]:
        if not bool(grad_N.any()):
            yield Broadcast(0, torch.zeros(1))
        yield AllGather(everyone, own)


class clears_out_first(gathers):
    """Zeroes ``out_N`` before the gradient is read: they may be the same tensor."""

    def before_encode(self, me: Member, grad_N: Tensor, out_N: Tensor) -> None:
        out_N.zero_()


class trusts_old_buffers(gathers):
    """Sums into a scratch buffer that holds the sum of the step before."""

    def start(self, me: Member, out_N: Tensor) -> Tensor:
        return me.scratch("sum", out_N.numel(), out_N, working_dtype(out_N.dtype))


class asks_for_its_payload_again(gathers):
    """Finds its payload by name a second time; of more than 64 KiB it is gone by
    then.
    """

    def talk(
        self, me: Member, grad_N: Tensor, own: Tensor, everyone: Tensor
    ) -> Steps[None]:
        def by_name(numel: int) -> Tensor:
            return me.scratch("own", numel, grad_N, torch.uint8, varies=True)

        by_name(0)
        yield AllGather(everyone, by_name(own.numel()))


class scales_the_gradient(gathers):
    """Divides the caller's gradient in place."""

    def before_encode(self, me: Member, grad_N: Tensor, out_N: Tensor) -> None:
        grad_N.div_(me.world)


class sums_in_the_gradients_dtype(gathers):
    """Divides after the sum, in 16 bits if the gradient has them."""

    def start(self, me: Member, out_N: Tensor) -> Tensor:
        return torch.zeros_like(out_N)


class hides_aggregator_loss(casync_ps):
    """Re-encodes the mean like CaSync-PS, and keeps only the worker's own loss."""

    def run(self, codec, me, state, grad_N, out_N, residual_N):
        state = yield from super().run(codec, me, state, grad_N, out_N, residual_N)
        if residual_N is not None:
            start, stop = chunk_bounds(grad_N.numel(), me.world)[me.rank]
            residual_N[start:stop] = 0
        return state


class forgets_what_hops_drop(casync_ring):
    """Selects again at each hop like CaSync-Ring, and keeps the loss of its first
    encode alone.
    """

    def run(self, codec, me, state, grad_N, out_N, residual_N):
        state = yield from super().run(codec, me, state, grad_N, out_N, residual_N)
        if residual_N is not None:
            start, stop = chunk_bounds(grad_N.numel(), me.world)[me.rank]
            residual_N[:start] = 0
            residual_N[stop:] = 0
        return state


class encodes_its_own_chunk(casync_ps):
    """Encodes also the chunk that it merges itself, with W times what its mean lost
    before.
    """

    def run(self, codec, me, state, grad_N, out_N, residual_N):
        if residual_N is None or me.world == 1:
            return (yield from super().run(codec, me, state, grad_N, out_N, residual_N))
        start, stop = chunk_bounds(grad_N.numel(), me.world)[me.rank]
        sent_N, left_C, own = (
            grad_N.clone(),
            residual_N[start:stop].clone(),
            codec.chunk(start, stop),
        )
        payload, _ = own.encode(None, grad_N[start:stop], residual_N=left_C)
        own.decode(payload, sent_N[start:stop])
        residual_N[start:stop] = 0
        state = yield from super().run(codec, me, state, sent_N, out_N, residual_N)
        residual_N[start:stop] += left_C
        return state


class sums_in_16_bits(Summing):
    """Has the library add up whatever travels, in its own dtype: rounds at every
    addition.
    """

    def sum_up(self, me, values_N):
        yield AllReduce(values_N)
