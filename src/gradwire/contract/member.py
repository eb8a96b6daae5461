"""A rank's part in a message: its place, its buffers, and what a step was like.

**Sizes** of payloads that vary are announced before the payloads themselves
travel. Where a compressor's sizes follow from the spec, they are known and nothing is
sent. So which verbs come in which order follows from the compressor alone. Rows of
embeddings are counted in every step. Wire: 8 bytes for each other rank.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RanksDiffer
from .room import Room
from .verbs import AllGather, AllToAll, Compute, Steps

if TYPE_CHECKING:
    from .compressor import Compressor, Residual


_ON_HOST = torch.empty(0, device="cpu")

# ---- scratch of a thread -------------------------------------------------------------
#
# They serve within one computation and are free again at its end. A thread does one
# computation at a time, so they are kept once a thread, and not once a message: all
# messages of a compute lane use the same ones.


class _Own:
    """The scratch of one thread, by name, dtype and device.

    They end with the thread.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


class _Threads(threading.local):
    def __init__(self) -> None:
        self.own = _Own()
        with _lock:
            _all.add(self.own)


_lock = threading.Lock()
_all: weakref.WeakSet[_Own] = weakref.WeakSet()
_threads = _Threads()


def thread_scratch(
    name: str, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A vector of ``numel`` undefined elements for this thread's computation.

    It is valid until the computation ends.

    Within one computation every use has another name. A buffer only grows, by an eighth
    more than is needed. What is never written of it takes no memory of a CPU.
    """
    own = _threads.own.found
    found = own.get((name, dtype, device))
    if found is None or found.numel() < numel:
        room = numel if found is None else numel + numel // 8
        with torch.inference_mode(False):  # it may be written outside of that next time
            found = own[name, dtype, device] = torch.empty(
                room, dtype=dtype, device=device
            )
    return found[:numel]


def thread_scratch_bytes(*, own: bool = False) -> int:
    """Bytes of all threads' scratch in this process, or of this thread's ``own``."""
    kept = [_threads.own]
    if not own:
        with _lock:
            kept = list(_all)
    found = [tensor for one in kept for tensor in list(one.found.values())]
    return sum(tensor.nbytes for tensor in found if not tensor.is_meta)


# ---- members -------------------------------------------------------------------------


def nothing() -> None:
    """Does nothing.

    A simulation calls it in place of a computation whose result nobody needs.
    """


_SPARE = 8
_SMALL = 2**16
"""A buffer whose size varies may have so many times the elements that are needed, and
so many more.
"""


def orders_of(exchanges: Iterable[Hashable]) -> list[int]:
    """The order of each message among those of its exchange: see ``Member.order``.

    >>> orders_of(["dense", "onebit", "dense", "dense"])
    [0, 0, 1, 2]
    """
    before = Counter[Hashable]()
    orders = []
    for exchange in exchanges:
        orders.append(before[exchange])
        before[exchange] += 1
    return orders


class Selection(NamedTuple):
    """How many elements of one message a step asked for, took and averaged."""

    asked: float
    """The density asked for, times the number of elements.

    NaN where a codec has no density.
    """
    selected: int
    """The number of elements that this rank took."""
    arrived: int
    """The number of elements in the mean: in the union of what all ranks took."""


class Imbalance(NamedTuple):
    """How much more than its equal share the busiest part had: 1 is balanced, W is all
    on one rank.

    Source: ZEN (OSDI 2025), definition 8. The same on every rank.
    """

    push: float
    """max over ranks i and parts j of W * |what i pushed to j| / |what i pushed|."""
    pull: float
    """max over parts j of W * |what j holds of all ranks| / |what all hold|."""


class Shards(NamedTuple):
    """How a tensor-parallel group cuts a message's layers.

    This rank holds one part.
    """

    place: int
    """This rank's part, counted in the group's order."""
    numels: tuple[int, ...]
    """How many elements of the message each part has."""


class Member:
    """One rank's place in one message, and the buffers that it may reuse.

    Buffers are found by name, so the second and all later steps allocate nothing. What
    a message sends, or needs in a later computation, lies in ``scratch``, and all else
    in ``thread_scratch``.
    """

    __slots__ = (
        "_across",
        "_buffers",
        "_room",
        "_variant",
        "ahead",
        "cluster",
        "imbalance",
        "order",
        "rank",
        "selection",
        "shards",
        "way",
        "world",
    )

    def __init__(self, rank: int, world: int, order: int = 0) -> None:
        self.rank = rank
        self.world = world
        self.order = order
        """How many messages of a step before this one take the same exchange; the same
        on every rank. The order chooses the ranks that do what not all ranks have to
        do.
        """
        self.selection: Selection | None = None
        """The last step's selection.

        None where nothing was selected, as for dense gradients.
        """
        self.imbalance: Imbalance | None = None
        """The last step's imbalance; None where gradients are not cut into parts."""
        self.way: str | None = None
        """The last step's way (see ``exchange/natural``).

        None where ranks choose none.
        """
        self.cluster: Any = None
        """The ranks and links (a Cluster), the same on every rank.

        None where they are not known.
        """
        self.shards: Shards | None = None
        """The parts of the layers, if other ranks hold some; else None.

        An exchange may ask these ranks.
        """
        self.ahead: dict[int, Any] = {}
        """The tensors that were encoded before the message, by place: see
        `EncodesTensors`. Empty outside of a step.
        """
        self._buffers: dict[str, Tensor] = {}
        self._room: Room | None = None
        self._across: Member | None = None
        self._variant: tuple[Compressor, Compressor] | None = None

    def across(self, ranks_per_host: int) -> Member:
        """This rank's place among those of the same place on all hosts.

        It has buffers of its own.
        """
        if self._across is None:
            place = self.rank // ranks_per_host
            num_hosts = self.world // ranks_per_host
            self._across = type(self)(place, num_hosts, self.order)
        return self._across

    def through(
        self,
        exchange: Any,
        state: Any,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[Any]:
        """The steps of another exchange; see ``Exchange.synchronise``."""
        steps: Steps[Any] = exchange.synchronise(self, state, grad_N, out_N, residual_N)
        return steps

    def variant_of(self, codec: Compressor, *, world: int | None = None) -> Compressor:
        """The codec as this rank uses it.

        Steps that sum nothing on the wire ask for that of a ``world`` of 1:
        their values need not be divided by W first. Steps ask for one of the two.
        """
        if self._variant is None or self._variant[0] is not codec:
            self._variant = codec, codec.for_world(world or self.world, self.rank)
        return self._variant[1]

    def scratch(
        self,
        name: str,
        numel: int,
        like: Tensor,
        dtype: torch.dtype,
        *,
        varies: bool = False,
    ) -> Tensor:
        """A buffer of ``numel`` undefined elements on the device of ``like``.

        Ask once for what is written, and keep the tensor as long as it is needed: asked
        for again, within a step too, the name may stand for the same memory or for
        other. A law hands out buffers that are overwritten each time they are asked
        for.

        Where ``numel`` ``varies`` from step to step it is the front of a buffer that
        grows, each time by an eighth more than is needed: soon it grows no more. One of
        which less than an eighth is needed now, as after a warm-up of density, is let
        go.
        """
        found = self._buffers.get(name)
        most = _SPARE * numel + _SMALL if varies else numel
        fits = found is not None and numel <= found.numel() <= most
        if (
            found is None
            or not fits
            or found.dtype != dtype
            or found.device != like.device
        ):
            kept = numel + numel // 8 if varies and found is not None else numel
            found = torch.zeros(kept, dtype=dtype, device=like.device)
            self._buffers[name] = found
        return found[:numel] if varies else found

    def room(self, numel: int, like: Tensor, dtype: torch.dtype) -> Room | None:
        """The message's room of ``numel`` undefined elements.

        None if no other rank can map it.
        """
        if self._room is None:
            self._room = Room(numel, like, dtype)
        fits = self._room.own_M.numel() == numel and self._room.own_M.dtype == dtype
        return self._room if fits and self._room.is_open else None

    def drop(self, name: str) -> None:
        """Gives a buffer of ``scratch`` back, which is not needed any more."""
        self._buffers.pop(name, None)

    def announced(self, name: str, numel: int) -> Tensor:
        """A buffer (int64) for numbers that ranks announce to each other.

        It lies in host memory, wherever payloads lie, as what is done next depends on
        them.
        """
        return self.scratch(name, numel, _ON_HOST, torch.int64)

    def thread_scratch(
        self, name: str, numel: int, like: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """A buffer of ``numel`` undefined elements, valid within one computation only.

        All messages share it, by ``name``: see `thread_scratch`.
        """
        return thread_scratch(name, numel, dtype, like.device)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of ``scratch`` by name, with the room and those among hosts."""
        across = {} if self._across is None else self._across.buffers
        room = {"room": self._room.own_M} if self._room and self._room.is_open else {}
        return {
            **self._buffers,
            **room,
            **{f"{name} among hosts": one for name, one in across.items()},
        }

    def sizes(
        self,
        announced_W: Tensor,
        limits: Sequence[int],
        *,
        unit: str = "bytes",
        ranks: Sequence[int] | None = None,
        usual: Sequence[int] | None = None,
    ) -> list[int]:
        """The sizes that ranks announced to this one, each checked against its limit.

        ``ranks`` announced them, by default one each. ``usual`` is what a simulation,
        where nobody announces anything, goes on with; by default the limits. Raises
        ``RanksDiffer`` if a size is beyond its limit.
        """
        found: list[int] = announced_W.tolist()
        for rank, size, limit in zip(
            ranks or range(self.world), found, limits, strict=True
        ):
            if not 0 <= size <= limit:
                raise RanksDiffer(
                    f"rank {rank} of {self.world} announces a payload of {size} "
                    f"{unit}, and rank {self.rank} can take {limit}; give every rank "
                    "the same model, compressor and settings"
                )
        return found

    def encoding(
        self,
        codec: Compressor,
        state: Any,
        grad_N: Tensor,
        residual_N: Residual,
        room: Tensor,
    ) -> Compute:
        """Encodes a gradient, with any residual; its result is that of ``encode``."""
        encode = partial(
            codec.encode, state, grad_N, residual_N=residual_N, buffer=room
        )
        return Compute("encode", encode, grad_N.numel())

    def sized(
        self,
        name: str,
        fn: Callable[[], Any],
        numel: int,
        usual: Callable[[], Any] = nothing,
    ) -> Compute:
        """A computation of values that a simulation does not have.

        It goes on with ``usual()`` instead, on which the sizes of later verbs may
        depend.
        """
        return Compute(name, fn, numel)


SIZE_BYTES = torch.int64.itemsize
"""Bytes of one size on the wire."""


def announce_all(
    me: Member,
    codec: Compressor,
    size_bytes: int,
    limits: Sequence[int],
    *,
    usual: Sequence[int] | None = None,
) -> Steps[list[int]]:
    """Announces this rank's size; returns all ranks' sizes, in rank order.

    ``limits`` are the largest that each may have; ``usual`` is as for ``Member.sizes``.
    """
    if codec.traits.exact_size:
        return list(limits)
    announced_W = yield from _announced(me, size_bytes)
    return me.sizes(announced_W, limits, usual=usual)


def announce_count(
    me: Member, count: int, most: int, *, unit: str = "units"
) -> Steps[list[int]]:
    """Tells every rank how many units this one has, at most ``most``.

    Returns all ranks' counts.

    In a simulation all ranks have as many.
    """
    announced_W = yield from _announced(me, count)
    return me.sizes(announced_W, [most] * me.world, unit=unit, usual=[count] * me.world)


def _announced(me: Member, own: int) -> Steps[Tensor]:
    own_1 = me.announced("own size", 1).fill_(own)
    announced_W = me.announced("announced sizes", me.world)
    yield AllGather(announced_W, own_1)
    return announced_W


def announce_each(
    me: Member, codec: Compressor, sizes: Sequence[int], limits: Sequence[int]
) -> Steps[list[int]]:
    """Announces ``sizes[i]`` to rank i; returns what others announced here."""
    if codec.traits.exact_size:
        return list(limits)
    announced_W = yield from announced_each(me, sizes)
    return me.sizes(announced_W, limits)


def announced_each(me: Member, own: Sequence[int]) -> Steps[Tensor]:
    """Announces ``own[i]`` to rank i; returns what others announced here."""
    own_W = me.announced("own sizes", me.world).copy_(torch.tensor(own, device="cpu"))
    announced_W = me.announced("announced sizes", me.world)
    one_each = (1,) * me.world
    yield AllToAll(announced_W, own_W, one_each, one_each)
    return announced_W
