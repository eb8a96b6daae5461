"""Ring all-reduce from sends and receives: reduce-scatter, then all-gather.

Source: HiPress section 2.2, figure 1b; Patarasu and Yuan 2009 (bandwidth optimal).
Differences: none; payloads are summed in their own dtype at every hop. So values of 16
    bits are rounded W times, where ``allreduce`` rounds them twice.
Wire: W chunks; each rank sends all chunks but one in each of the two phases,
    2(W-1)/W of the payload when W divides it.
State: the codec's.
Contributed: the encoded gradient; for 16-bit payloads the rounding of partial sums is
in no rank's residual.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from ..contract import Member
from ..contract.spec import chunk_bounds
from ..contract.verbs import Compute, Recv, Send, Steps, Verb
from .allreduce import Summing


@dataclass(frozen=True, kw_only=True)
class ring(Summing):
    """Ring all-reduce of payloads that can be summed."""

    encodes_sums: ClassVar[bool] = True

    def sum_up(self, me: Member, values_N: Tensor) -> Steps[None]:
        rank = me.rank
        world = me.world
        chunks = [values_N[a:b] for a, b in chunk_bounds(values_N.numel(), world)]
        arrived = me.scratch("arrived", chunks[0].numel(), values_N, values_N.dtype)
        for step in range(world - 1):
            out = chunks[(rank - step) % world]
            into = chunks[(rank - step - 1) % world]
            landing = arrived[: into.numel()]
            yield from hop(me, out, landing)
            yield Compute("merge", partial(into.add_, landing), into.numel())
        for step in range(world - 1):
            yield from hop(
                me, chunks[(rank + 1 - step) % world], chunks[(rank - step) % world]
            )


def hop(me: Member, out: Tensor, into: Tensor) -> Steps[None]:
    """One step along the ring; empty slots (more ranks than elements) are not sent."""
    verbs: list[Verb] = []
    if out.numel():
        verbs.append(Send(me.right, out))
    if into.numel():
        verbs.append(Recv(me.left, into))
    if verbs:
        yield tuple(verbs)


EXAMPLES = (ring(),)
