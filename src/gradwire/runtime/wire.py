"""Verbs on torch.distributed: the only place where a text's bytes meet a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..collective._verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Recv,
    ReduceScatter,
    Send,
    Verb,
)

Group = Any
"""A torch.distributed process group."""

# torch 2.13 renamed these two; older releases know the second name only.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def open_channels(group: Group | None, count: int, timeout: timedelta) -> list[Group]:
    """``count`` further process groups of the same ranks, each for one message at a time.

    They are gloo groups whatever the backend of ``group`` is: buffers lie in host memory. Only the
    ranks of ``group`` take part in making them.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return [
        dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        for _ in range(count)
    ]


def carry_out(verbs: Sequence[Verb], channel: Group) -> None:
    """Starts all verbs on one channel, then waits for all of them."""
    works = [_start(verb, channel) for verb in verbs]
    for work in works:
        if work is not None:
            work.wait()


def _start(verb: Verb, channel: Group) -> Any:
    match verb:
        case Send(dst, buf):
            return dist.isend(buf, group=channel, group_dst=dst)
        case Recv(src, buf):
            return dist.irecv(buf, group=channel, group_src=src)
        case AllReduce(buf):
            return dist.all_reduce(buf, group=channel, async_op=True)
        case AllGather(out, buf):
            return _all_gather(out, buf, group=channel, async_op=True)
        case AllToAll(out, buf, out_sizes, in_sizes):
            return dist.all_to_all_single(
                out, buf, list(out_sizes), list(in_sizes), group=channel, async_op=True
            )
        case ReduceScatter(out, buf):
            return _reduce_scatter(out, buf, group=channel, async_op=True)
        case Broadcast(src, buf):
            return dist.broadcast(buf, group=channel, group_src=src, async_op=True)
        case _:
            raise AssertionError(f"{verb!r} is not a communication verb")


def broadcast_all(tensors: Sequence[Tensor], channel: Group, *, src: int = 0) -> None:
    """Replaces tensors, wherever they lie, by those of group rank ``src``."""
    for tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        dist.broadcast(host, group=channel, group_src=src)
        if dist.get_rank(channel) != src:
            tensor.detach().copy_(host)


def gather_objects(value: object, channel: Group) -> list[Any]:
    """Every rank's ``value`` in rank order; for small set-up data only, never for gradients."""
    found: list[Any] = [None] * dist.get_world_size(channel)
    dist.all_gather_object(found, value, group=channel)
    return found
