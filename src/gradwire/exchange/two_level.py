"""Hosts with several ranks: a host's ranks add up first, and each exchanges its share
with others.

A host's link is slow beside what its ranks have among themselves. So a message is
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
    given to each other rank; among hosts what the inner exchange makes of a share. With
    whole tensors a rank receives (L-1) times its own share and sends all others'.
State: the inner exchange's, of a share. A residual inside is one of the host's mean
    gradient: for the sum over ranks it counts L times.
Contributed: a rank's own gradient; what of the host's share does not arrive is taken
    off that of the rank that exchanges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collective.steps.shares import Shapes, Shares, shares_of
from ..contract import Compressor, Exchange, Member, Residual, State
from ..contract.bounds import check_whole
from ..contract.room import Room
from ..contract.spec import TensorSpec, working_dtype
from ..contract.state import leaves
from ..contract.verbs import (
    AllGather,
    AllToAll,
    Among,
    Compute,
    Recv,
    Send,
    Steps,
    Verb,
    rewritten,
)
from ..errors import invalid
from .by_name import Accounting, exchange_for
from .clipping import Clipping
from .error_feedback import Wrapper, chooser_of, nested
from .local import check_hosts

_BLOCK = 2**17
"""Elements that are added up at once: as many of each rank stay in a processor's
cache.
"""


class HostState(NamedTuple):
    """The shapes of the tensors in the message, and the inner exchange's state of a
    share.

    ``place`` is the number of the share, counted among the host's ranks.
    """

    shapes: Shapes
    place: int
    inner: State


def without_hosts(state: State) -> State:
    """A state as if each rank were a host: with that of the inner exchange in place of
    hosts'.
    """
    if isinstance(state, HostState):
        return state.inner
    if not isinstance(state, tuple):
        return state
    parts = map(without_hosts, state)
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


@dataclass(frozen=True)
class TwoLevel(Wrapper):
    """An exchange among hosts of ``ranks_per_host`` ranks each; made by ``with_hosts``.

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
            accepted = (
                "one with fixed settings: a rank of a host knows only its own "
                "tensors' losses"
            )
            remedy = "attach it without mesh=, or leave adapt out"
            raise invalid(
                "exchange among hosts of several ranks", self.inner, accepted, remedy
            )
        if self.inner.ranks_per_host != 1:
            accepted = "an exchange that knows no hosts"
            raise invalid(
                "exchange among hosts", self.inner, accepted, "write with_hosts once"
            )

    def init(self, spec: TensorSpec, world: int) -> HostState:
        shapes = spec.tensor_shapes
        if world == 1:
            return HostState(shapes, 0, self.inner.init(spec, 1))
        check_hosts(self.ranks_per_host, world)
        inner = self.inner.init(self.share(spec), world // self.ranks_per_host)
        return HostState(shapes, spec.rank % self.ranks_per_host, inner)

    def share(self, spec: TensorSpec) -> TensorSpec:
        """The spec of the share of a message that rank ``spec.rank`` exchanges with
        other hosts.
        """
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
            accepted = (
                f"that of rank {place} of a host: each keeps state of its own tensors"
            )
            remedy = "make it by init(dataclasses.replace(spec, rank=rank), world)"
            raise invalid("state", f"that of rank {state.place}", accepted, remedy)
        across = me.across(self.ranks_per_host)
        total_S, own_S, lost_S, rooms = yield from self._reduce(
            me, shares, grad_N, residual_N
        )
        given_S = total_S.clone() if isinstance(across, Accounting) else None
        text = across.through(self.inner, state.inner, own_S, own_S, lost_S)
        inner = yield from among_hosts(text)
        for path, kept_S in leaves(inner) if shares.is_filled else ():
            if path.endswith("_N") and kept_S.numel() == shares.numels[place]:
                shares.clear_filled(
                    kept_S, place
                )  # no saved state has what holds no element
        if (
            isinstance(me, Accounting)
            and isinstance(across, Accounting)
            and given_S is not None
        ):
            # What of the host's share does not arrive is taken off this rank's
            # contribution.
            whole_N = (grad_N if residual_N is None else residual_N).to(
                given_S.dtype, copy=True
            )
            own = shares.own(whole_N, place)
            own += shares.count * (across.contributed_N - given_S)
            shares.put(own, place, whole_N)
            me.contributed_N = whole_N
        me.selection = across.selection
        me.imbalance = across.imbalance
        me.way = across.way
        means = yield from _means(me, shares, own_S, grad_N, out_N, rooms)

        def join() -> None:
            if means:
                shares.join(means, out_N)
            if residual_N is not None and lost_S is not None:
                residual_N.zero_()
                shares.put(lost_S.mul_(shares.count), place, residual_N)
                torch.nan_to_num_(residual_N, nan=0.0, posinf=0.0, neginf=0.0)

        yield Compute("join", join, grad_N.numel())
        return HostState(state.shapes, state.place, inner)

    def _reduce(
        self, me: Member, shares: Shares, grad_N: Tensor, residual_N: Residual
    ) -> Steps[tuple[Tensor, Tensor, Tensor | None, list[Tensor] | None]]:
        """The mean over the host's ranks of this rank's share, as it is sent, and its
        residual.

        The residual is there where ``residual_N`` is, of which the sum with the
        gradient is taken. Last are the rooms of the host's ranks; None where ranks do
        not read each other's.
        """
        share = me.rank % shares.count
        working = _working(grad_N)
        is_working = grad_N.dtype == working
        own_numel = shares.numels[share]
        room, cut_M = yield from _cut(me, shares, grad_N, residual_N)
        is_lent = room is not None and room.parts is not None
        sums_M = cut_M
        sizes = (own_numel,) * shares.count
        if not is_lent:
            sums_M = me.scratch("sums", sum(sizes), grad_N, working)
        # A share of the host's gradients for each of its ranks, from all of them.
        rooms = yield AllToAll(sums_M, cut_M, sizes, shares.numels, Among.HOST, room)
        if rooms is None:
            parts = [*sums_M.view(shares.count, own_numel)]
            total_S = own_S = parts[0]
            if not is_working:
                own_S = me.scratch("share", own_numel, grad_N, grad_N.dtype)
        else:
            me.drop("sums")
            parts = [_slots(one, shares)[share] for one in rooms]
            total_S = parts[share]
            own_S = _mean_in(rooms[share], share, shares, grad_N)
        lost_S = None
        if residual_N is not None:
            lost_S = me.scratch("residual of the share", own_numel, grad_N, working)

        def average() -> None:
            if rooms is None:
                self._average(parts, total_S)
            for one in () if rooms is None else shares.ranges(share):
                # The own slot has no part yet, as others have read a mean there until
                # now.
                own = slice(one.place, one.place + one.stop - one.start)
                each = [part_S[own] for part_S in parts]
                each[share] = (grad_N if residual_N is None else residual_N)[
                    one.start : one.stop
                ]
                self._average(each, total_S[own])
            shares.clear_filled(total_S, share)
            if not is_working:
                own_S.copy_(total_S)
            if lost_S is not None and is_working:
                lost_S.zero_()
            elif lost_S is not None:  # what a 16-bit share cannot hold
                torch.nan_to_num_(torch.sub(total_S, own_S, out=lost_S), 0.0, 0.0, 0.0)

        yield Compute("average", average, grad_N.numel())
        return total_S, own_S, lost_S, rooms

    def _average(self, parts: Sequence[Tensor], into: Tensor) -> None:
        """Writes the mean of ranks' parts, added up in rank order; ``into`` may be the
        first.
        """
        size = _BLOCK if into.is_cpu else max(1, into.numel())
        for *each, into_B in zip(
            *(torch.split(one, size) for one in (*parts, into)), strict=True
        ):
            first_B, *others = (part_B.to(into.dtype) for part_B in each)
            torch.mul(first_B, 1 / len(parts), out=into_B)
            for other_B in others:
                into_B.add_(other_B, alpha=1 / len(parts))


def _working(grad_N: Tensor) -> torch.dtype:
    return working_dtype(grad_N.dtype)


def _cut(
    me: Member, shares: Shares, grad_N: Tensor, residual_N: Residual
) -> Steps[tuple[Room | None, Tensor]]:
    """Cuts the sum of gradient and residual into shares, in a room if other ranks can
    map it.

    Returns the room and the shares, which are the gradient itself where nothing is to
    be done.
    """
    whole = sum(shares.numels)
    working = _working(grad_N)
    is_working = grad_N.dtype == working
    # Behind the shares there is room for the mean, where that has another dtype.
    room = me.room(whole + (0 if is_working else max(shares.numels)), grad_N, working)
    if room is not None:
        cut_M = room.own_M[:whole]
    elif (
        shares.in_place and is_working and residual_N is None and grad_N.is_contiguous()
    ):
        return None, grad_N
    else:
        cut_M = me.scratch("shares", whole, grad_N, working)
    # Others may still read the mean of the step before, in this rank's own slot.
    kept = (
        me.rank % shares.count if room is not None and room.parts is not None else None
    )

    def cut() -> None:
        pending_N = grad_N if residual_N is None else residual_N.add_(grad_N)
        shares.cut(pending_N, cut_M, but=kept)

    yield Compute("cut", cut, grad_N.numel())
    return room, cut_M


def _mean_in(room_M: Tensor, rank: int, shares: Shares, grad_N: Tensor) -> Tensor:
    """The place of the mean of a rank's share in its room: the slot that it needs for
    no other.
    """
    if grad_N.dtype == _working(grad_N):
        return _slots(room_M, shares)[rank]
    return room_M[sum(shares.numels) :].view(grad_N.dtype)[: shares.numels[rank]]


def _slots(room_M: Tensor, shares: Shares) -> tuple[Tensor, ...]:
    """The shares in a room."""
    return torch.split(room_M[: sum(shares.numels)], list(shares.numels))


def _means(
    me: Member,
    shares: Shares,
    own_S: Tensor,
    grad_N: Tensor,
    out_N: Tensor,
    rooms: Sequence[Tensor] | None,
) -> Steps[dict[int, Tensor]]:
    """The means of shares by number, each from its rank of the host, that ``out_N``
    lacks yet.
    """
    share = me.rank % shares.count
    if rooms is not None:
        # Nobody reads a mean before all have written theirs.
        told = me.told("all are there", shares.count)
        own = me.told("this one is there", 1)
        put = Compute(
            "join", lambda: shares.join({share: own_S}, out_N), shares.numels[share]
        )
        yield AllGather(told, own, Among.HOST), put
        others = ((rank, one) for rank, one in enumerate(rooms) if rank != share)
        return {rank: _mean_in(one, rank, shares, grad_N) for rank, one in others}
    means_M = out_N
    is_in_place = shares.in_place and out_N.is_contiguous()
    if not is_in_place:
        # The room of the shares that were cut is free now, if its dtype fits.
        name = "shares" if grad_N.dtype == _working(grad_N) else "means"
        means_M = me.scratch(name, sum(shares.numels), grad_N, grad_N.dtype)
    yield from _give(means_M, own_S, shares, share)
    return (
        {}
        if is_in_place
        else dict(enumerate(torch.split(means_M, list(shares.numels))))
    )


def _give(means_M: Tensor, own_S: Tensor, shares: Shares, share: int) -> Steps[None]:
    """Fills ``means_M`` with all shares: each rank gives its own to all others of its
    host.

    Every share is received in its place, and an empty one is not sent. Through gloo's
    all-gather the same bytes took two to three times as long.
    """
    slots = torch.split(means_M, list(shares.numels))
    others = [rank for rank in range(shares.count) if rank != share]
    given = [Send(rank, own_S, Among.HOST) for rank in others if shares.numels[share]]
    taken = [
        Recv(rank, slots[rank], Among.HOST) for rank in others if shares.numels[rank]
    ]
    if given or taken:
        yield (*given, *taken)
    yield Compute("own share", lambda: slots[share].copy_(own_S), shares.numels[share])


def among_hosts(text: Steps[Any]) -> Steps[Any]:
    """The same text, whose verbs for the network are among hosts."""

    def each(asked: Verb | tuple[Verb, ...]) -> Steps[Any]:
        if isinstance(asked, tuple):
            return (yield tuple(_moved(verb) for verb in asked))
        return (yield _moved(asked))

    return rewritten(text, each)


def _moved(verb: Verb) -> Verb:
    if isinstance(verb, Compute):
        return verb
    assert verb.among is Among.RANKS, f"{verb!r} inside of an exchange among hosts"
    return replace(verb, among=Among.HOSTS)


def with_hosts(algorithm: Compressor | Exchange, ranks_per_host: int) -> Exchange:
    """An exchange for hosts of several ranks, which share a link: ``algorithm`` is
    among hosts.

    ``attach(mesh=)`` makes it. ``algorithm`` is a compressor (it gets the collective
    that suits it, and error feedback if it needs that) or an exchange. Error feedback
    goes inside: then a rank's residual is as long as its share. Clipping and wrappers
    around it stay outside, as a rank clips its own gradient. An exchange that takes
    tensors whole gets shares of whole tensors. Raises ``InvalidSetting`` for an
    exchange that chooses its settings as it runs (``adapt``).

    >>> from gradwire.compress.none import none
    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.tensor([1.0, 2.0]) * rank for rank in range(4)]
    >>> run_local(with_hosts(none(), ranks_per_host=2), grads)[0][0]
    tensor([1.5000, 3.0000])
    """
    return on_hosts(exchange_for(algorithm), ranks_per_host)


def on_hosts(exchange: Exchange, ranks_per_host: int) -> Exchange:
    """The same exchange among hosts of so many ranks; where each has one, the exchange
    itself.
    """
    if ranks_per_host == 1:
        return exchange
    if isinstance(exchange, Wrapper) and any(
        isinstance(o, Clipping) for o in nested(exchange)
    ):
        return replace(exchange, inner=on_hosts(exchange.inner, ranks_per_host))
    return TwoLevel(exchange, ranks_per_host)
