"""Hosts with several ranks: a host's ranks add up first, and each exchanges its share with others.

A host's link is slow beside what its ranks have among themselves. So a message is averaged in three
parts: every rank of a host gets the sum of one share of it, exchanges that share with the ranks of
the same place on the other hosts, and gives the mean to the ranks of its host. All ranks of a host
use the link at once, each for its own share, and every element crosses it once in each direction.

Source: HiPress (SOSP 2021), section 5.1, "local aggregation": gradients are aggregated among local
    GPUs before they are compressed and synchronised across nodes.
Differences: the paper does not say who compresses for a host. Here each rank does, an L-th of every
    tensor. A tensor whose elements do not divide is filled up with zeros, so that all shares have
    one length; a tensor of many rows is cut between rows.
Wire: within the host (L-1) times a share in the working dtype, by an all-to-all whose parts are
    added up in rank order, and (L-1) times a share in the gradient's dtype, given to each other
    rank; among hosts what the inner exchange makes of a share.
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
from .error_feedback import Wrapper, nested
from .local import check_hosts


class HostState(NamedTuple):
    """The shapes of the tensors in the message, and the inner exchange's state of a share."""

    shapes: Shapes
    inner: State


@dataclass(frozen=True)
class TwoLevel(Wrapper):
    """An exchange among hosts of ``ranks_per_host`` ranks each; made by ``with_hosts``.

    Ranks are numbered host after host: rank r is on host r // ranks_per_host.
    """

    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        check_whole("ranks_per_host", self.ranks_per_host, "leave it out for one rank on each host")
        if self.inner.declared.whole_tensors:
            accepted = "one that acts on flat vectors: each rank of a host exchanges a share"
            remedy = "attach it without mesh=, or take another one"
            raise invalid("exchange among hosts of several ranks", self.inner, accepted, remedy)
        if self.inner.ranks_per_host != 1:
            accepted = "an exchange that knows no hosts"
            raise invalid("exchange among hosts", self.inner, accepted, "write with_hosts once")

    def init(self, spec: TensorSpec, world: int) -> HostState:
        shapes = spec.tensor_shapes
        if world == 1:
            return HostState(shapes, self.inner.init(spec, 1))
        check_hosts(self.ranks_per_host, world)
        return HostState(shapes, self.inner.init(self.share(spec), world // self.ranks_per_host))

    def share(self, spec: TensorSpec) -> TensorSpec:
        """The spec of the share of a message that each rank exchanges with other hosts."""
        shares = shares_of(spec.tensor_shapes, self.ranks_per_host)
        shapes = tuple((part,) for part in shares.parts)
        return TensorSpec(spec.name, shares.numel, spec.dtype, shapes)

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
            return HostState(state.shapes, alone)
        shares = shares_of(state.shapes, self.ranks_per_host)
        across = me.across(self.ranks_per_host)
        total_S, own_S, lost_S = yield from self._reduce(me, shares, grad_N, residual_N)
        given_S = total_S.clone() if isinstance(across, Accounting) else None
        text = across.through(self.inner, state.inner, own_S, own_S, lost_S)
        inner = yield from among_hosts(text)
        _drop_filled(inner, shares, me.rank % shares.count)
        if isinstance(me, Accounting) and isinstance(across, Accounting) and given_S is not None:
            # What of the host's share does not arrive is taken off this rank's contribution.
            whole_N = (grad_N if residual_N is None else residual_N).to(given_S.dtype, copy=True)
            own = shares.own(whole_N, me.rank % shares.count)
            own += shares.count * (across.contributed_N - given_S)
            shares.put(own, me.rank % shares.count, whole_N)
            me.contributed_N = whole_N
        me.selection, me.imbalance, me.way = across.selection, across.imbalance, across.way
        means_M = out_N
        if not (shares.in_place and out_N.is_contiguous()):
            # The room of the shares that were cut is free now, if its dtype fits.
            name = "shares" if grad_N.dtype == _working(grad_N) else "means"
            means_M = me.scratch(name, shares.count * shares.numel, grad_N, grad_N.dtype)
        yield from _give(means_M, own_S, shares, me.rank % shares.count)

        def join() -> None:
            if means_M is not out_N:
                shares.join(means_M, out_N)
            if residual_N is not None and lost_S is not None:
                residual_N.zero_()
                shares.put(lost_S.mul_(shares.count), me.rank % shares.count, residual_N)
                torch.nan_to_num_(residual_N, nan=0.0, posinf=0.0, neginf=0.0)

        yield Compute("join", join, grad_N.numel())
        return HostState(state.shapes, inner)

    def _reduce(
        self, me: Member, shares: Shares, grad_N: Tensor, residual_N: Tensor | None
    ) -> Steps[tuple[Tensor, Tensor, Tensor | None]]:
        """The mean over the host's ranks of this rank's share, as it is sent, and its residual.

        The last is there where ``residual_N`` is, of which the sum with the gradient is taken.
        """
        whole, numel, working = shares.count * shares.numel, grad_N.numel(), _working(grad_N)
        is_working, cut_M = grad_N.dtype == working, grad_N
        sums_M = me.scratch("sums", whole, grad_N, working)
        if not (shares.in_place and is_working and residual_N is None and grad_N.is_contiguous()):
            cut_M = me.scratch("shares", whole, grad_N, working)

            def cut() -> None:
                shares.cut(grad_N if residual_N is None else residual_N.add_(grad_N), cut_M)

            yield Compute("cut", cut, numel)
        yield _all_to_all(sums_M, cut_M, shares)
        total_S = own_S = sums_M[: shares.numel]
        if not is_working:
            own_S = me.scratch("share", shares.numel, grad_N, grad_N.dtype)
        lost_S = None
        if residual_N is not None:
            lost_S = me.scratch("residual of the share", shares.numel, grad_N, working)

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
        first_S, *others = torch.split(sums_M, shares.numel) if shares.numel else [sums_M]
        first_S.mul_(1 / shares.count)
        for other_S in others:
            first_S.add_(other_S, alpha=1 / shares.count)
        return first_S


def _working(grad_N: Tensor) -> torch.dtype:
    return working_dtype(grad_N.dtype)


def _all_to_all(out_M: Tensor, cut_M: Tensor, shares: Shares) -> AllToAll:
    """A share of the host's gradients for each of its ranks, from all of them."""
    sizes = (shares.numel,) * shares.count
    return AllToAll(out_M, cut_M, sizes, sizes, Among.HOST)


def _give(means_M: Tensor, own_S: Tensor, shares: Shares, share: int) -> Steps[None]:
    """Fills ``means_M`` with all shares: each rank gives its own to all others of its host.

    Every share is received in its place. Through gloo's all-gather the same bytes took two to three
    times as long.
    """
    slots = means_M.view(shares.count, shares.numel)
    others = [rank for rank in range(shares.count) if rank != share]
    given = [Send(rank, own_S, Among.HOST) for rank in others]
    yield (*given, *(Recv(rank, slots[rank], Among.HOST) for rank in others))
    yield Compute("own share", lambda: slots[share].copy_(own_S), shares.numel)


def _drop_filled(inner: State, shares: Shares, share: int) -> None:
    """Drops what an inner state keeps of places that hold no element of the message.

    A saved state does not have them.
    """
    if shares.is_filled:
        for path, own_S in leaves(inner):
            if path.endswith("_N") and own_S.numel() == shares.numel:
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
    its own gradient. Raises ``InvalidSetting`` for an exchange that takes tensors whole, as a share
    holds parts.

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
