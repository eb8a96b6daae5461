"""Hosts with several ranks: a host's ranks add up first, and each exchanges its share with others.

A host's link is slow beside what its ranks have among themselves. So a message is averaged in three
parts: every rank of a host gets the sum of one share of it, exchanges that share with the ranks of
the same place on the other hosts, and gives the mean to the ranks of its host. All ranks of a host
use the link at once, each for its own share, and every element crosses it once in each direction.

Source: HiPress (SOSP 2021), section 5.1, "local aggregation": gradients are aggregated among local
    GPUs before they are compressed and synchronised across nodes.
Differences: the paper does not say who compresses for a host. Here each rank does, an L-th of every
    tensor. A tensor whose elements do not divide is filled up with zeros, so that all shares have
    one length; a tensor of many rows is cut between rows. If the inner exchange takes tensors
    whole, as PowerSGD does, shares are of whole tensors: the largest first, each to the rank with
    fewest elements. A rank may then have no tensor; it takes part with a share of no element.
Wire: within the host (L-1) times a share in the working dtype, by an all-to-all whose parts are
    added up in rank order, and (L-1) times a share in the gradient's dtype, given to each other
    rank; among hosts what the inner exchange makes of a share. With whole tensors a rank receives
    (L-1) times its own share and sends all others'.
State: the inner exchange's, of a share. A residual inside is one of the host's mean gradient: for
    the sum over ranks it counts L times.
Contributed: a rank's own gradient; what of the host's share does not arrive is taken off that of
    the rank that exchanges it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collective.steps.shares import Shapes, Shares, shares_of
from ..contract import Compressor, Exchange, Member, State
from ..contract.bounds import check_whole
from ..contract.spec import TensorSpec, working_dtype
from ..contract.state import leaves
from ..contract.verbs import AllToAll, Among, Compute, Recv, Send, Steps, Verb
from ..errors import invalid
from .by_name import Accounting, exchange_for
from .clipping import Clipping
from .error_feedback import Wrapper, chooser_of, nested
from .local import check_hosts


class HostState(NamedTuple):
    """The shapes of the tensors in the message, and the inner exchange's state of a share.

    ``place`` is the number of the share, counted among the host's ranks.
    """

    shapes: Shapes
    place: int
    inner: State


def without_hosts(state: State) -> State:
    """A state as if each rank were a host: with that of the inner exchange in place of hosts'."""
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
        check_whole("ranks_per_host", self.ranks_per_host, "leave it out for one rank on each host")
        if chooser_of(self.inner) is not None:
            accepted = (
                "one with fixed settings: a rank of a host knows only its own tensors' losses"
            )
            remedy = "attach it without mesh=, or leave adapt out"
            raise invalid("exchange among hosts of several ranks", self.inner, accepted, remedy)
        if self.inner.ranks_per_host != 1:
            accepted = "an exchange that knows no hosts"
            raise invalid("exchange among hosts", self.inner, accepted, "write with_hosts once")

    def init(self, spec: TensorSpec, world: int) -> HostState:
        shapes = spec.tensor_shapes
        if world == 1:
            return HostState(shapes, 0, self.inner.init(spec, 1))
        check_hosts(self.ranks_per_host, world)
        inner = self.inner.init(self.share(spec), world // self.ranks_per_host)
        return HostState(shapes, spec.rank % self.ranks_per_host, inner)

    def share(self, spec: TensorSpec) -> TensorSpec:
        """The spec of the share of a message that rank ``spec.rank`` exchanges with other hosts."""
        shares, place = self._shares(spec.tensor_shapes), spec.rank % self.ranks_per_host
        return TensorSpec(spec.name, shares.numels[place], spec.dtype, shares.shapes[place])

    def _shares(self, shapes: Shapes) -> Shares:
        return shares_of(shapes, self.ranks_per_host, self.declared.whole_tensors)

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        if me.world == 1:
            alone = yield from me.through(self.inner, state.inner, grad_N, out_N, residual_N)
            return HostState(state.shapes, 0, alone)
        shares, place = self._shares(state.shapes), me.rank % self.ranks_per_host
        if state.place != place and self.declared.whole_tensors:
            accepted = f"that of rank {place} of a host: each keeps state of its own tensors"
            remedy = "make it by init(dataclasses.replace(spec, rank=rank), world)"
            raise invalid("state", f"that of rank {state.place}", accepted, remedy)
        across = me.across(self.ranks_per_host)
        total_S, own_S, lost_S = yield from self._reduce(me, shares, grad_N, residual_N)
        given_S = total_S.clone() if isinstance(across, Accounting) else None
        text = across.through(self.inner, state.inner, own_S, own_S, lost_S)
        inner = yield from among_hosts(text)
        _drop_filled(inner, shares, place)
        if isinstance(me, Accounting) and isinstance(across, Accounting) and given_S is not None:
            # What of the host's share does not arrive is taken off this rank's contribution.
            whole_N = (grad_N if residual_N is None else residual_N).to(given_S.dtype, copy=True)
            own = shares.own(whole_N, place)
            own += shares.count * (across.contributed_N - given_S)
            shares.put(own, place, whole_N)
            me.contributed_N = whole_N
        me.selection, me.imbalance, me.way = across.selection, across.imbalance, across.way
        means_M = out_N
        if not (shares.in_place and out_N.is_contiguous()):
            # The room of the shares that were cut is free now, if its dtype fits.
            name = "shares" if grad_N.dtype == _working(grad_N) else "means"
            means_M = me.scratch(name, sum(shares.numels), grad_N, grad_N.dtype)
        yield from _give(means_M, own_S, shares, place)

        def join() -> None:
            if means_M is not out_N:
                shares.join(means_M, out_N)
            if residual_N is not None and lost_S is not None:
                residual_N.zero_()
                shares.put(lost_S.mul_(shares.count), place, residual_N)
                torch.nan_to_num_(residual_N, nan=0.0, posinf=0.0, neginf=0.0)

        yield Compute("join", join, grad_N.numel())
        return HostState(state.shapes, state.place, inner)

    def _reduce(
        self, me: Member, shares: Shares, grad_N: Tensor, residual_N: Tensor | None
    ) -> Steps[tuple[Tensor, Tensor, Tensor | None]]:
        """The mean over the host's ranks of this rank's share, as it is sent, and its residual.

        The last is there where ``residual_N`` is, of which the sum with the gradient is taken.
        """
        own, numel, working = me.rank % shares.count, grad_N.numel(), _working(grad_N)
        is_working, cut_M, own_numel = grad_N.dtype == working, grad_N, shares.numels[own]
        sums_M = me.scratch("sums", shares.count * own_numel, grad_N, working)
        if not (shares.in_place and is_working and residual_N is None and grad_N.is_contiguous()):
            cut_M = me.scratch("shares", sum(shares.numels), grad_N, working)

            def cut() -> None:
                shares.cut(grad_N if residual_N is None else residual_N.add_(grad_N), cut_M)

            yield Compute("cut", cut, numel)
        # A share of the host's gradients for each of its ranks, from all of them.
        yield AllToAll(sums_M, cut_M, (own_numel,) * shares.count, shares.numels, Among.HOST)
        total_S = own_S = sums_M[:own_numel]
        if not is_working:
            own_S = me.scratch("share", own_numel, grad_N, grad_N.dtype)
        lost_S = None
        if residual_N is not None:
            lost_S = me.scratch("residual of the share", own_numel, grad_N, working)

        def average() -> None:
            self._average(sums_M, shares)
            if not is_working:
                own_S.copy_(total_S)
            if lost_S is not None and is_working:
                lost_S.zero_()
            elif lost_S is not None:  # what a 16-bit share cannot hold
                torch.nan_to_num_(torch.sub(total_S, own_S, out=lost_S), 0.0, 0.0, 0.0)

        yield Compute("average", average, numel)
        return total_S, own_S, lost_S

    def _average(self, sums_M: Tensor, shares: Shares) -> Tensor:
        """The mean of one share's parts, which lie one behind the other; it replaces the first."""
        first_S, *others = sums_M.chunk(shares.count)
        first_S.mul_(1 / shares.count)
        for other_S in others:
            first_S.add_(other_S, alpha=1 / shares.count)
        return first_S


def _working(grad_N: Tensor) -> torch.dtype:
    return working_dtype(grad_N.dtype)


def _give(means_M: Tensor, own_S: Tensor, shares: Shares, share: int) -> Steps[None]:
    """Fills ``means_M`` with all shares: each rank gives its own to all others of its host.

    Every share is received in its place, and an empty one is not sent. Through gloo's all-gather
    the same bytes took two to three times as long.
    """
    slots = torch.split(means_M, list(shares.numels))
    others = [rank for rank in range(shares.count) if rank != share]
    given = [Send(rank, own_S, Among.HOST) for rank in others if shares.numels[share]]
    taken = [Recv(rank, slots[rank], Among.HOST) for rank in others if shares.numels[rank]]
    if given or taken:
        yield (*given, *taken)
    yield Compute("own share", lambda: slots[share].copy_(own_S), shares.numels[share])


def _drop_filled(inner: State, shares: Shares, share: int) -> None:
    """Drops what an inner state keeps of places that hold no element of the message.

    A saved state does not have them.
    """
    if shares.is_filled:
        for path, own_S in leaves(inner):
            if path.endswith("_N") and own_S.numel() == shares.numels[share]:
                shares.clear_filled(own_S, share)


def among_hosts(text: Steps[Any]) -> Steps[Any]:
    """The same text, whose verbs for the network are among hosts."""
    value = None
    while True:
        try:
            asked = text.send(value)
        except StopIteration as stop:
            return stop.value
        verbs = asked if isinstance(asked, tuple) else (asked,)
        moved = tuple(_moved(verb) for verb in verbs)
        value = yield moved if isinstance(asked, tuple) else moved[0]


def _moved(verb: Verb) -> Verb:
    if isinstance(verb, Compute):
        return verb
    assert verb.among is Among.RANKS, f"{verb!r} inside of an exchange among hosts"
    return replace(verb, among=Among.HOSTS)


def with_hosts(algorithm: Compressor | Exchange, ranks_per_host: int) -> Exchange:
    """An exchange for hosts of several ranks, which share a link: ``algorithm`` is among hosts.

    ``attach(mesh=)`` makes it. ``algorithm`` is a compressor (it gets the collective that suits it,
    and error feedback if it needs that) or an exchange. Error feedback goes inside: then a rank's
    residual is as long as its share. Clipping and wrappers around it stay outside, as a rank clips
    its own gradient. An exchange that takes tensors whole gets shares of whole tensors. Raises
    ``InvalidSetting`` for an exchange that chooses its settings as it runs (``adapt``).

    >>> from gradwire.compress.none import none
    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.tensor([1.0, 2.0]) * rank for rank in range(4)]
    >>> run_local(with_hosts(none(), ranks_per_host=2), grads)[0][0]
    tensor([1.5000, 3.0000])
    """
    return on_hosts(exchange_for(algorithm), ranks_per_host)


def on_hosts(exchange: Exchange, ranks_per_host: int) -> Exchange:
    """The same exchange among hosts of so many ranks; where each has one, the exchange itself."""
    if ranks_per_host == 1:
        return exchange
    if isinstance(exchange, Wrapper) and any(isinstance(o, Clipping) for o in nested(exchange)):
        return replace(exchange, inner=on_hosts(exchange.inner, ranks_per_host))
    return TwoLevel(exchange, ranks_per_host)
