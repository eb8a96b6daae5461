"""Verbs on torch.distributed: the only place where a text's bytes meet a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo

from ..errors import InvalidSetting
from ..verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Broadcast,
    Recv,
    ReduceScatter,
    Send,
    Verb,
)

Group = Any
"""A torch.distributed process group."""
Channel = Any
"""A gloo process group of gradwire's own."""


def open_channels(
    name: str, rank: int, world: int, count: int, timeout: timedelta
) -> list[Channel]:
    """``count`` process groups of the same ranks, each for one message at a time.

    They are gloo groups whatever the backend of the user's group is: buffers lie in host memory.
    ``name`` is known to these ranks and used once. ``dist.new_group`` does not serve: it names
    groups by how many a process has, so ranks that are in different numbers of groups would wait
    for each other for ever. It also keeps groups, with their connections, until the job ends.
    """
    store = default_store()
    return [
        ProcessGroupGloo(PrefixStore(f"gradwire/{name}/{i}", store), rank, world, timeout)
        for i in range(count)
    ]


def give_back(channels: list[Channel]) -> None:
    """Closes the channels and empties the list.

    They are closed side by side: gloo takes about 20 ms for each, in which it only waits.
    """
    closing = [threading.Thread(target=channels.pop, name="gradwire close") for _ in channels]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def default_store() -> Any:
    """The job's rendezvous store, for which torch has no public name."""
    return dist.distributed_c10d._get_default_store()


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Runs work that may wait for the store, and so for ever, on a thread nothing waits for.

    torch bounds how long a store waits for a key, but not how long it waits for the store's host:
    where the host is stopped, no call comes back.
    """
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="gradwire store", daemon=True).start()
    return done


class Routes:
    """The channels of one rank: one for each communication lane, and a second one among shards.

    Both lists are empty where this rank is alone there.
    """

    def __init__(self, rank: int, world: int, lanes: Sequence[str]) -> None:
        self.rank, self.world, self.lanes = rank, world, lanes
        self.channels: list[Channel] = []
        self.shard_channels: list[Channel] = []

    def of(self, verbs: Sequence[Verb], message: int, lane: int) -> tuple[Channel, Channel]:
        """The channels that a message's verbs take on a lane; the second is None if none needs it.

        Raises ``InvalidSetting`` where there is nobody to reach.
        """
        if not self.channels:
            raise InvalidSetting(
                f"message {message} asks for {verbs[0]!r}, and this rank is alone; have your "
                "exchange return the gradient itself where world is 1"
            )
        if not any(map(is_among_shards, verbs)):
            return self.channels[lane], None
        if not self.shard_channels:
            raise InvalidSetting(
                f"message {message} asks for a gather among shards, and attach was given none: "
                "write shards=mesh['tp'], or have the exchange see whether me.shards is None"
            )
        return self.channels[lane], self.shard_channels[lane]

    def clear(self) -> None:
        """Gives all channels back."""
        give_back(self.channels)
        give_back(self.shard_channels)


def carry_out(verbs: Sequence[Verb], channel: Channel, shards: Channel = None) -> None:
    """Starts all verbs on one channel, then waits for all of them.

    Gathers among shards take ``shards``, the channel's second group.
    """
    works = [_start(verb, shards if is_among_shards(verb) else channel) for verb in verbs]
    for work in works:
        work.wait()


def is_among_shards(verb: Verb) -> bool:
    """Whether a verb is for the ranks that hold the other parts of the same layers."""
    return isinstance(verb, AllGather) and verb.among is Among.SHARDS


def _start(verb: Verb, channel: Channel) -> Any:
    match verb:
        case Send(dst, buf):
            return channel.send([buf], dst, 0)
        case Recv(src, buf):
            return channel.recv([buf], src, 0)
        case AllReduce(buf):
            return channel.allreduce([buf])
        case AllGather(out, buf):
            return channel._allgather_base(out, buf)
        case AllToAll(out, buf, out_sizes, in_sizes):
            return channel.alltoall_base(out, buf, list(out_sizes), list(in_sizes))
        case ReduceScatter(out, buf):
            return channel._reduce_scatter_base(out, buf)
        case Broadcast(src, buf):
            options = BroadcastOptions()
            options.rootRank = src
            return channel.broadcast([buf], options)
        case _:
            raise AssertionError(f"{verb!r} is not a communication verb")


def broadcast_all(tensors: Sequence[Tensor], channel: Channel, *, src: int = 0) -> None:
    """Replaces tensors, wherever they lie, by those of group rank ``src``."""
    for tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        if host.numel():
            # As bytes: gloo does not know every dtype.
            carry_out([Broadcast(src, host.view(-1).view(torch.uint8))], channel)
        if channel.rank() != src:
            tensor.detach().copy_(host)
