"""Hosts with several ranks: they add up first, and exchange their shares with others.

A host's link is slower than transfers among its ranks. So a message is
averaged in three parts: every rank of a host gets the sum of one share of it, exchanges
that share with the ranks of the same place on the other hosts, and gives the mean to
the ranks of its host. All ranks of a host use the link at once, each for its own share,
and every element crosses it once in each direction.

Source: HiPress (SOSP 2021), section 5.1, "local aggregation": gradients are aggregated
    among local GPUs before they are compressed and synchronised across nodes.
Differences: the paper does not say who compresses for a host. Here each rank does, an
    L-th of every tensor. A tensor whose elements do not divide is filled up with zeros,
    so that all shares have one length; a tensor of many rows is cut between rows. If
    the inner exchange takes tensors whole, as PowerSGD does, shares are of whole
    tensors: the largest first, each to the rank with fewest elements. A rank may then
    have no tensor; it takes part with a share of no element. Where a host's ranks read
    each other's memory, nothing is sent within the host. A rank's room has a slot for
    each share. The rank writes its parts of others' shares there, and the mean of its
    own share into its own slot. Others read this mean in their last computation of a
    step. So the own slot is written only after the next step's all-to-all, to which all
    ranks have come.
Wire: within the host (L-1) times a share in the working dtype, by an all-to-all whose
    parts are added up in rank order, and (L-1) times a share in the gradient's dtype,
    given to each other rank; among hosts the inner exchange's bytes for a share. With
    whole tensors a rank receives (L-1) times its own share and sends all others'.
State: the inner exchange's, of a share. A residual inside is one of the host's mean
    gradient: for the sum over ranks it counts L times.
Contributed: a rank's own gradient. Parts of the host's share that do not arrive are
    taken off the contribution of the rank that exchanges the share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collective.steps.shares import Shapes, Shares, shares_of
from ..contract import Exchange, Member, Residual, State
from ..contract.bounds import check_whole
from ..contract.spec import TensorSpec, clear_not_finite, working_dtype
from ..contract.state import leaves, rebuilt
from ..contract.verbs import (
    AllGather,
    AllToAll,
    Among,
    Compute,
    Recv,
    Room,
    Send,
    Steps,
    Verb,
    rewritten,
)
from ..errors import invalid
from .by_name import Accounting
from .error_feedback import Wrapper, chooser_of, nested
from .local import check_hosts
from .mapped_room import MappedRoom

_BLOCK = 2**17
"""Elements that are added up at once: as many a rank stay in a processor's cache."""


class HostState(NamedTuple):
    """The shapes of a message's tensors, and the inner exchange's state of a share.

    ``place`` is the number of the share, counted among the host's ranks.
    """

    shapes: Shapes
    place: int
    inner: State


def without_hosts(state: State) -> State:
    """A state as if each rank were a host, with the inner state for hosts'."""
    if isinstance(state, HostState):
        return state.inner
    return rebuilt(state, without_hosts)


@dataclass(frozen=True)
class TwoLevel(Wrapper):
    """An exchange among hosts of ``ranks_per_host`` ranks each; made by ``on_hosts``.

    Ranks are numbered host after host: rank r is on host r // ranks_per_host.
    """

    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        check_whole(
            "ranks_per_host",
            self.ranks_per_host,
            "leave it out for one rank on each host",
        )
        if chooser_of(self.inner) is not None:
            raise invalid(
                "exchange among hosts of several ranks",
                self.inner,
                "one with fixed settings: a rank of a host knows only its own "
                "tensors' losses",
                "attach it without mesh=, or leave adapt out",
            )
        if self.inner.ranks_per_host != 1:
            raise invalid(
                "exchange among hosts",
                self.inner,
                "an exchange that knows no hosts",
                "attach the exchange inside of it",
            )

    def init(self, spec: TensorSpec, world: int) -> HostState:
        shapes = spec.tensor_shapes
        if world == 1:
            return HostState(shapes, 0, self.inner.init(spec, 1))
        check_hosts(self.ranks_per_host, world)
        inner = self.inner.init(self.share(spec), world // self.ranks_per_host)
        return HostState(shapes, spec.rank % self.ranks_per_host, inner)

    def share(self, spec: TensorSpec) -> TensorSpec:
        """The spec of the share that rank ``spec.rank`` exchanges with other hosts."""
        shares = self._shares(spec.tensor_shapes)
        place = spec.rank % self.ranks_per_host
        return TensorSpec(
            spec.name, shares.numels[place], spec.dtype, shares.shapes[place]
        )

    def _shares(self, shapes: Shapes) -> Shares:
        return shares_of(shapes, self.ranks_per_host, self.declared.whole_tensors)

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        if me.world == 1:
            alone = yield from me.through(
                self.inner, state.inner, grad_N, out_N, residual_N
            )
            return HostState(state.shapes, 0, alone)
        shares = self._shares(state.shapes)
        place = me.rank % self.ranks_per_host
        if state.place != place and self.declared.whole_tensors:
            raise invalid(
                "state",
                f"that of rank {state.place}",
                f"that of rank {place} of a host: each keeps state of its own tensors",
                "make it by init(dataclasses.replace(spec, rank=rank), world)",
            )
        across = me.across(self.ranks_per_host)
        pending = _Pending(me, shares, grad_N, residual_N)
        host = yield from _scattered(pending)
        yield Compute("average", host.average, grad_N.numel())
        mean_S = host.mean_S
        given_S = host.total_S.clone() if isinstance(across, Accounting) else None
        inner = yield from among_hosts(
            across.through(self.inner, state.inner, mean_S, mean_S, host.lost_S)
        )
        # Saved states have no values of elements that fill a share up.
        for path, kept_S in leaves(inner) if shares.is_filled else ():
            if path.endswith("_N") and kept_S.numel() == pending.numel:
                shares.clear_filled(kept_S, place)
        if given_S is not None:
            _account(pending, across, given_S)
        me.selection = across.selection
        me.imbalance = across.imbalance
        me.way = across.way
        means = yield from host.gather(out_N)

        def join() -> None:
            if means:
                shares.join(means, out_N)
            host.keep_lost()

        yield Compute("join", join, grad_N.numel())
        return HostState(state.shapes, state.place, inner)


def _account(pending: _Pending, across: Member, given_S: Tensor) -> None:
    """Notes this rank's contribution, less the lost part of its host's share."""
    me = pending.me
    assert isinstance(me, Accounting)
    assert isinstance(across, Accounting)
    whole_N = pending.whole_N.to(given_S.dtype, copy=True)
    shares = pending.shares
    own_S = shares.own(whole_N, pending.place)
    own_S += shares.count * (across.contributed_N - given_S)
    shares.put(own_S, pending.place, whole_N)
    me.contributed_N = whole_N


@dataclass(frozen=True)
class _Pending:
    """The gradient and residual that a rank contributes to the means of its host."""

    me: Member
    shares: Shares
    grad_N: Tensor
    residual_N: Residual

    @property
    def place(self) -> int:
        """The number of this rank's own share."""
        return self.me.rank % self.shares.count

    @property
    def whole_N(self) -> Tensor:
        """The sum of both once shares are cut: it lies in the residual, if any."""
        return self.grad_N if self.residual_N is None else self.residual_N

    @property
    def numel(self) -> int:
        """The elements of this rank's own share."""
        return self.shares.numels[self.place]

    @property
    def working(self) -> torch.dtype:
        """The dtype of sums."""
        return working_dtype(self.grad_N.dtype)

    @property
    def is_working(self) -> bool:
        """Whether means are sent in the dtype of sums."""
        return self.grad_N.dtype == self.working

    def scratch(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of the message, on the gradient's device."""
        return self.me.scratch(name, numel, self.grad_N, dtype)


class _HostMean(ABC):
    """The mean over a host's ranks of one rank's share, once all shares are scattered.

    ``total_S`` is the mean in the dtype of sums, and ``mean_S`` the mean as it is sent.
    """

    total_S: Tensor
    mean_S: Tensor

    def __init__(self, pending: _Pending) -> None:
        self.pending = pending
        self.lost_S: Tensor | None = None
        """The residual of the share; None where there is no residual of the message."""
        if pending.residual_N is not None:
            name = "residual of the share"
            self.lost_S = pending.scratch(name, pending.numel, pending.working)

    def keep_lost(self) -> None:
        """Writes the lost part of the share into the message's residual."""
        residual_N = self.pending.residual_N
        if residual_N is not None and self.lost_S is not None:
            shares = self.pending.shares
            residual_N.zero_()
            lost_S = self.lost_S.mul_(shares.count)
            shares.put(lost_S, self.pending.place, residual_N)
            clear_not_finite(residual_N)

    def average(self) -> None:
        """Writes the mean, and as the residual the part beyond its 16 bits."""
        self._add_up()
        total_S = self.total_S
        self.pending.shares.clear_filled(total_S, self.pending.place)
        lost_S = self.lost_S
        if not self.pending.is_working:
            self.mean_S.copy_(total_S)
        if lost_S is not None and self.pending.is_working:
            lost_S.zero_()
        elif lost_S is not None:
            torch.sub(total_S, self.mean_S, out=lost_S)
            clear_not_finite(lost_S)

    @abstractmethod
    def _add_up(self) -> None:
        """Writes ``total_S``, but for elements that fill the share up."""

    @abstractmethod
    def gather(self, out_N: Tensor) -> Steps[dict[int, Tensor]]:
        """Gets the means of all shares.

        Returns by number the means that ``out_N`` lacks.
        """


class _ByExchange(_HostMean):
    """Ranks send each other their parts of shares, and then the means."""

    def __init__(self, pending: _Pending, sums_M: Tensor) -> None:
        super().__init__(pending)
        self._parts = [*sums_M.view(pending.shares.count, pending.numel)]
        self.total_S = self._parts[0]
        self.mean_S = self.total_S
        if not pending.is_working:
            self.mean_S = pending.scratch("share", pending.numel, pending.grad_N.dtype)

    def _add_up(self) -> None:
        _write_mean(self._parts, self.total_S)

    def gather(self, out_N: Tensor) -> Steps[dict[int, Tensor]]:
        pending = self.pending
        shares = pending.shares
        if shares.in_place and out_N.is_contiguous():
            yield from _give(out_N, self.mean_S, shares, pending.place)
            return {}
        # The room of the shares that were cut is free now, if its dtype fits.
        name = "shares" if pending.is_working else "means"
        means_M = pending.scratch(name, sum(shares.numels), pending.grad_N.dtype)
        yield from _give(means_M, self.mean_S, shares, pending.place)
        return dict(enumerate(torch.split(means_M, list(shares.numels))))


class _InMemory(_HostMean):
    """Ranks read each other's rooms: parts of shares first, and then the means."""

    def __init__(self, pending: _Pending, rooms: Sequence[Tensor]) -> None:
        super().__init__(pending)
        pending.me.drop("sums")
        self._rooms = rooms
        place = pending.place
        self._parts = [_slots(room_M, pending.shares)[place] for room_M in rooms]
        self.total_S = self._parts[place]
        self.mean_S = self._mean_of(place)

    def _add_up(self) -> None:
        pending = self.pending
        for piece in pending.shares.ranges(pending.place):
            slot = slice(piece.place, piece.place + piece.numel)
            parts = [part_S[slot] for part_S in self._parts]
            # The own slot has no part yet, as others have read a mean there until now.
            parts[pending.place] = pending.whole_N[piece.start : piece.stop]
            _write_mean(parts, self.total_S[slot])

    def gather(self, out_N: Tensor) -> Steps[dict[int, Tensor]]:
        me = self.pending.me
        shares = self.pending.shares
        place = self.pending.place
        # Nobody reads a mean before all have written theirs.
        announced = me.announced("all are there", shares.count)
        own_1 = me.announced("this one is there", 1)
        put = Compute(
            "join",
            lambda: shares.join({place: self.mean_S}, out_N),
            shares.numels[place],
        )
        yield AllGather(announced, own_1, Among.HOST), put
        others = [rank for rank in range(shares.count) if rank != place]
        return {rank: self._mean_of(rank) for rank in others}

    def _mean_of(self, rank: int) -> Tensor:
        """The place of the mean of a rank's share in its room.

        It is the slot that the rank needs for no other. A mean of another dtype lies
        behind all slots.
        """
        shares = self.pending.shares
        room_M = self._rooms[rank]
        if self.pending.is_working:
            return _slots(room_M, shares)[rank]
        behind_M = room_M[sum(shares.numels) :].view(self.pending.grad_N.dtype)
        return behind_M[: shares.numels[rank]]


def _scattered(pending: _Pending) -> Steps[_HostMean]:
    """Gives a share of the gradient to each rank of the host, and gets this rank's.

    Whether ranks read each other's memory is the driver's to say, by the verb's result.
    """
    shares = pending.shares
    numels = shares.numels
    room = _room_of(pending)
    cut_M = yield from _cut(pending, room)
    sums_M = cut_M
    if not _is_lent(room):
        sums_M = pending.scratch("sums", shares.count * pending.numel, pending.working)
    sizes = (pending.numel,) * shares.count
    rooms = yield AllToAll(sums_M, cut_M, sizes, numels, Among.HOST, room)
    if rooms is None:
        return _ByExchange(pending, sums_M)
    return _InMemory(pending, rooms)


def _room_of(pending: _Pending) -> Room | None:
    """The message's room, or None if no other rank can map it."""
    me = pending.me
    numels = pending.shares.numels
    # Behind the shares there is room for the mean, where that has another dtype.
    behind = 0 if pending.is_working else max(numels)
    numel = sum(numels) + behind
    if me.room is None:
        me.room = MappedRoom(numel, pending.grad_N, pending.working)
    own_M = me.room.own_M
    fits = own_M.numel() == numel and own_M.dtype == pending.working
    return me.room if fits and me.room.is_open else None


def _cut(pending: _Pending, room: Room | None) -> Steps[Tensor]:
    """Cuts the sum of gradient and residual into shares, in ``room`` if there is one.

    Returns the shares, which are the gradient itself where nothing is to be done.
    """
    shares = pending.shares
    grad_N = pending.grad_N
    residual_N = pending.residual_N
    whole = sum(shares.numels)
    is_cut = shares.in_place and pending.is_working and grad_N.is_contiguous()
    if room is not None:
        cut_M = room.own_M[:whole]
    elif is_cut and residual_N is None:
        return grad_N
    else:
        cut_M = pending.scratch("shares", whole, pending.working)
    # Others may still read the mean of the step before, in this rank's own slot.
    kept = pending.place if _is_lent(room) else None

    def cut() -> None:
        pending_N = grad_N if residual_N is None else residual_N.add_(grad_N)
        shares.cut(pending_N, cut_M, but=kept)

    yield Compute("cut", cut, grad_N.numel())
    return cut_M


def _is_lent(room: Room | None) -> bool:
    """Whether all ranks of the host have agreed that they read each other's rooms."""
    return room is not None and room.parts is not None


def _slots(room_M: Tensor, shares: Shares) -> tuple[Tensor, ...]:
    """The shares in a room."""
    return torch.split(room_M[: sum(shares.numels)], list(shares.numels))


def _write_mean(parts: Sequence[Tensor], into: Tensor) -> None:
    """Writes the mean of ranks' parts, added up in rank order.

    ``into`` may be the first part.
    """
    size = _BLOCK if into.is_cpu else max(1, into.numel())
    blocks = [torch.split(part, size) for part in parts]
    for into_B, *parts_B in zip(torch.split(into, size), *blocks, strict=True):
        first_B, *others = (part_B.to(into.dtype) for part_B in parts_B)
        torch.mul(first_B, 1 / len(parts), out=into_B)
        for other_B in others:
            into_B.add_(other_B, alpha=1 / len(parts))


def _give(means_M: Tensor, mean_S: Tensor, shares: Shares, share: int) -> Steps[None]:
    """Fills ``means_M`` with all shares: each rank gives its own to its host's others.

    Every share is received in its place, and an empty one is not sent. Through gloo's
    all-gather the same bytes took two to three times as long.
    """
    slots = torch.split(means_M, list(shares.numels))
    others = [rank for rank in range(shares.count) if rank != share]
    sends = []
    if shares.numels[share]:
        sends = [Send(rank, mean_S, Among.HOST) for rank in others]
    receives = [
        Recv(rank, slots[rank], Among.HOST) for rank in others if shares.numels[rank]
    ]
    if sends or receives:
        yield (*sends, *receives)
    yield Compute("own share", lambda: slots[share].copy_(mean_S), shares.numels[share])


def among_hosts(steps: Steps[Any]) -> Steps[Any]:
    """The same steps, whose verbs for the network are among hosts."""

    def each(asked: Verb | tuple[Verb, ...]) -> Steps[Any]:
        if isinstance(asked, tuple):
            return (yield tuple(_moved(verb) for verb in asked))
        return (yield _moved(asked))

    return rewritten(steps, each)


def _moved(verb: Verb) -> Verb:
    if isinstance(verb, Compute):
        return verb
    assert verb.among is Among.RANKS, f"{verb!r} inside of an exchange among hosts"
    return replace(verb, among=Among.HOSTS)


def on_hosts(exchange: Exchange, ranks_per_host: int) -> Exchange:
    """The same exchange among hosts of several ranks; itself where each has one.

    ``attach(mesh=)`` makes it. Error feedback goes inside: then a rank's residual is as
    long as its share. Clipping and wrappers around it stay outside, as a rank clips its
    own gradient. An exchange that takes tensors whole gets shares of whole tensors.
    Raises ``InvalidSetting`` for an exchange that chooses its settings as it runs
    (``adapt``).

    >>> from gradwire.compress.none import none
    >>> from gradwire.exchange.by_name import exchange_for, run_local
    >>> grads = [torch.tensor([1.0, 2.0]) * rank for rank in range(4)]
    >>> run_local(on_hosts(exchange_for(none()), 2), grads)[0][0]
    tensor([1.5000, 3.0000])
    """
    if ranks_per_host == 1:
        return exchange
    if isinstance(exchange, Wrapper) and any(
        part.is_of_rank for part in nested(exchange) if isinstance(part, Wrapper)
    ):
        return replace(exchange, inner=on_hosts(exchange.inner, ranks_per_host))
    return TwoLevel(exchange, ranks_per_host)
