"""Payloads of 16 bits: each rank sums its chunk in float32 for all others.

A library adds numbers of 16 bits in 16 bits, and rounds at every addition. So the error
of a mean grows with the number of ranks. Here a mean has two roundings, whatever that
number is: of each gradient, and of the mean. The bytes are an all-reduce's. Each
rank pushes the chunks of the others, adds up its own chunk in rank order, and all
gather the sums.
"""

from functools import partial

import torch
from torch import Tensor

from ...contract import Compressor, Member, Residual, State
from ...contract.spec import TensorSpec, clear_not_finite
from ...contract.verbs import AllGather, AllToAll, Compute, Steps
from ...kernels.cast import cast16_decode, cast16_encode
from .rounds import ROOM_BYTES, distances, transfers

NARROW = (torch.float16, torch.bfloat16)
"""The dtypes whose sums are taken in float32."""

_BLOCK = 2**17
"""Elements that are added up at once: as many a rank stay in a processor's cache."""

_SMALL_BYTES = ROOM_BYTES // 8
"""Chunks that are pushed by one all-to-all, as a round for each rank adds a latency.

Larger ones go to one rank after another. Sums of any size come back by an all-gather,
which is a ring: 4 hosts at 200 Mbit took 480 to 504 ms for messages that took 497 to
569 ms with rounds there too. Chunks in pieces, with one's push beside another's pull,
took no less.
"""


def is_narrow(codec: Compressor, spec: TensorSpec) -> bool:
    """Whether the payload's values have 16 bits."""
    return codec.format(spec).fields[0].dtype in NARROW


def unscaled_if_narrow(codec: Compressor, me: Member, spec: TensorSpec) -> Compressor:
    """The codec as this rank uses it in steps that sum nothing on the wire.

    Values of 16 bits are not divided by W first: that would round them once more.
    """
    keeps_scale = spec.dtype not in NARROW and not is_narrow(codec, spec)
    return me.variant_of(codec, world=None if keeps_scale else 1)


def averaged(
    codec: Compressor,
    me: Member,
    state: State,
    grad_N: Tensor,
    out_N: Tensor,
    residual_N: Residual,
) -> Steps[State]:
    """Leaves the mean in ``out_N``, of payloads that are one vector of 16-bit values.

    Operands and result are as in ``Collective.run``. A rank's residual takes what
    rounding the mean of its own chunk loses.
    """
    numel = grad_N.numel()
    world = me.world
    spec = TensorSpec("", numel, grad_N.dtype)
    chunk = -(-numel // world)
    codec = unscaled_if_narrow(codec, me, spec)
    (values,) = codec.format(spec).fields
    is_in_place = values.dtype == out_N.dtype and numel == chunk * world
    whole_M = out_N
    if not is_in_place:
        whole_M = me.scratch("payload", chunk * world, out_N, values.dtype)
    room = whole_M[:numel].view(torch.uint8)
    payload, state = yield me.encoding(codec, state, grad_N, residual_N, room)
    chunks = [*torch.split(whole_M, chunk)]
    arrived_M = me.scratch("arrived", chunk * world, out_N, values.dtype)
    parts = [*torch.split(arrived_M, chunk)]
    if chunk * values.dtype.itemsize <= _SMALL_BYTES:
        sizes = (chunk,) * world
        yield AllToAll(arrived_M, whole_M, sizes, sizes)
    else:
        for away in distances(1, world):
            yield tuple(transfers(me, away, chunks, parts))
        parts[me.rank] = chunks[me.rank]
    mean_C = me.scratch("mean", chunk, out_N, values.dtype)
    merge = partial(_merge, me, parts, mean_C, residual_N)
    yield me.sized("merge", merge, chunk * world)
    yield AllGather(whole_M, mean_C)
    if not is_in_place or not codec.is_decoded(scale=1.0):
        yield Compute("decode", lambda: codec.decode(payload, out_N, scale=1.0), numel)
    return state


def _merge(
    me: Member, parts: list[Tensor], mean_C: Tensor, residual_N: Residual
) -> None:
    """Rounds the mean of this rank's chunk; W times what that loses is its residual."""
    chunk = mean_C.numel()
    sum_C = me.thread_scratch("sum", chunk, mean_C, torch.float32)
    size = _BLOCK if mean_C.is_cpu else chunk
    pieces = (torch.split(vector, size) for vector in (*parts, sum_C, mean_C))
    for *each, sum_B, mean_B in zip(*pieces, strict=True):
        for rank, part_B in enumerate(each):
            cast16_decode(part_B, sum_B, 1 / len(parts), add=rank > 0)
        cast16_encode(sum_B, mean_B)
    if residual_N is None:
        return
    residual_C = residual_N[me.rank * chunk : (me.rank + 1) * chunk]
    lost_C = clear_not_finite(sum_C.sub_(mean_C))
    residual_C.add_(lost_C[: residual_C.numel()], alpha=me.world)
    clear_not_finite(residual_C)
