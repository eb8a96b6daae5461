"""A rank's part in a message: its place, its buffers, and what a step was like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import RanksDiffer
from .compressor import Compressor, Residual
from .figures import Imbalance, Selection
from .shards import Shards
from .thread_scratch import thread_scratch
from .verbs import Compute, Room, Steps

_ON_HOST = torch.empty(0, device="cpu")


def nothing() -> None:
    """Does nothing.

    A simulation calls it in place of a computation whose result nobody needs.
    """


_SPARE = 8
"""A buffer whose size varies may have this many times the elements that are needed."""
_SMALL = 2**16
"""The elements that it may have beside."""


class Member:
    """One rank's place in one message, and the buffers that it may reuse.

    Buffers are found by name, so the second and all later steps allocate nothing. What
    a message sends, or needs in a later computation, lies in ``scratch``, and all else
    in ``thread_scratch``.
    """

    __slots__ = (
        "_across",
        "_buffers",
        "_variant",
        "ahead",
        "cluster",
        "imbalance",
        "order",
        "rank",
        "room",
        "selection",
        "shards",
        "way",
        "world",
    )

    def __init__(self, rank: int, world: int, order: int = 0) -> None:
        self.rank = rank
        self.world = world
        self.order = order
        """The number of earlier messages of a step that take the same exchange; the
        same on every rank. It chooses ranks for work that not all ranks have to do.
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
        self.room: Room | None = None
        """The message's memory that other ranks of the host can read.

        None where the exchange has made none.
        """
        self._buffers: dict[str, Tensor] = {}
        self._across: Member | None = None
        self._variant: tuple[Compressor, Compressor] | None = None

    @property
    def right(self) -> int:
        """The next rank of the ring that all ranks form."""
        return (self.rank + 1) % self.world

    @property
    def left(self) -> int:
        """The rank before this one in the ring."""
        return (self.rank - 1) % self.world

    def across(self, ranks_per_host: int) -> Member:
        """This rank's number among the ranks with its place on all hosts.

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
            variant = codec.for_world(world or self.world, self.rank)
            self._variant = (codec, variant)
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
        buffer = self._buffers.get(name)
        most = _SPARE * numel + _SMALL if varies else numel
        if (
            buffer is None
            or not numel <= buffer.numel() <= most
            or buffer.dtype != dtype
            or buffer.device != like.device
        ):
            is_growing = varies and buffer is not None
            length = numel + numel // 8 if is_growing else numel
            buffer = torch.zeros(length, dtype=dtype, device=like.device)
            self._buffers[name] = buffer
        return buffer[:numel] if varies else buffer

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
        """The buffers of ``scratch`` by name, with the room, among hosts too."""
        tensors = dict(self._buffers)
        if self.room is not None and self.room.is_open:
            tensors["room"] = self.room.own_M
        if self._across is not None:
            for name, buffer in self._across.buffers.items():
                tensors[f"{name} among hosts"] = buffer
        return tensors

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
        announced: list[int] = announced_W.tolist()
        announcers = ranks or range(self.world)
        for rank, size, limit in zip(announcers, announced, limits, strict=True):
            if not 0 <= size <= limit:
                raise RanksDiffer(
                    f"rank {rank} of {self.world} announces a payload of {size} "
                    f"{unit}, and rank {self.rank} can take {limit}; give every rank "
                    "the same model, compressor and settings"
                )
        return announced

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
