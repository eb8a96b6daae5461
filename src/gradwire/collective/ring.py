"""Ring all-reduce from sends and receives: reduce-scatter, then all-gather, along a ring.

Source: HiPress section 2.2, figure 1b; Patarasu and Yuan 2009 (bandwidth optimal).
Differences: none; payloads are summed in their own dtype at every hop.
Wire: W chunks; each rank sends all chunks but one in each of the two phases,
    2(W-1)/W of the payload when W divides it.
State: the codec's.
Contributed: what the codec encoded; for 16-bit payloads the rounding of partial sums is nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..contract import Compressor, Member, State
from ..contract.collective import Collective, Needs
from ..contract.spec import TensorSpec, chunk_bounds
from ..contract.verbs import Compute, Recv, Send, Steps, Verb
from .allreduce import payload_buffer


@dataclass(frozen=True, kw_only=True)
class ring(Collective):
    """Ring all-reduce of payloads that can be summed."""

    needs: ClassVar[Needs] = Needs(additive=True, exact_size=True)

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        codec = me.variant_of(codec)
        spec = TensorSpec("", grad_N.numel(), grad_N.dtype)
        buffer = payload_buffer(codec, me, spec, out_N)
        payload, state = yield Compute(
            "encode",
            lambda: codec.encode(state, grad_N, residual_N=residual_N, buffer=buffer),
            spec.numel,
        )
        yield from ring_sum(me, payload["values"])
        yield Compute(
            "decode", lambda: codec.decode(payload, out_N, scale=1 / me.world), spec.numel
        )
        return state


def ring_sum(me: Member, values_N: Tensor) -> Steps[None]:
    """Replaces ``values_N`` by its sum over ranks; the same bits on every rank."""
    rank, world = me.rank, me.world
    chunks = [values_N[a:b] for a, b in chunk_bounds(values_N.numel(), world)]
    arrived = me.scratch("arrived", chunks[0].numel(), values_N, values_N.dtype)
    for step in range(world - 1):
        out, into = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        landing = arrived[: into.numel()]
        yield from hop(me, out, landing)
        yield Compute("merge", lambda into=into, landing=landing: into.add_(landing), into.numel())  # type: ignore[misc]
    for step in range(world - 1):
        yield from hop(me, chunks[(rank + 1 - step) % world], chunks[(rank - step) % world])


def hop(me: Member, out: Tensor, into: Tensor, beside: Compute | None = None) -> Steps[None]:
    """One step along the ring; empty slots (more ranks than elements) are not sent.

    ``beside`` is done while it is sent, and where nothing is.
    """
    verbs = (*([] if beside is None else [beside]), *passing_on(me, out, into))
    if verbs:
        yield verbs


def passing_on(me: Member, out: Tensor, into: Tensor) -> tuple[Verb, ...]:
    """The transfers of one step along the ring; none of what is empty."""
    sends = (Send((me.rank + 1) % me.world, out),) if out.numel() else ()
    return (*sends, Recv((me.rank - 1) % me.world, into)) if into.numel() else sends


EXAMPLES = (ring(),)
