"""One rank's step: sums within its team, then among teams, then the mean within its
team.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gradwire.compress._residual import as_working
from gradwire.contract import Member, Residual
from gradwire.contract.verbs import Compute, Recv, Send, Steps
from gradwire.kernels import select
from gradwire.kernels.sparse.entries import Entries, Part
from gradwire.kernels.sparse.merge import merge
from gradwire.kernels.sparse.scatter import scatter_entries

from .chunks import Chunked, Shelf, rounds


class Turn:
    """One rank's step. The rank's own chunk has place 0, the next chunk (mod m) place
    1, and so on.

    A team's sums are made in ``pending_N``, so what of them is not sent is a residual
    already. The sum of several teams is made elsewhere: elements in ``pending_N`` are
    pending on this rank only.
    """

    def __init__(
        self,
        me: Member,
        chunks: Chunked,
        teams: int,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> None:
        self.me = me
        self.chunks = chunks
        self.grad_N = grad_N
        self.out_N = out_N
        self.is_kept = residual_N is not None
        if residual_N is None:
            residual_N = me.scratch("pending", grad_N.numel(), grad_N, chunks.sum_dtype)
        self.pending_N = residual_N
        self.teams = teams
        self.size = me.world // teams
        self.team, place = divmod(me.rank, self.size)
        self.order = [*range(place, self.size), *range(place)]
        self.sums = Shelf(me, chunks, self.order, "sums", chunks.sum_dtype, grad_N)
        self.means = Shelf(me, chunks, self.order, "means", chunks.dtype, grad_N)

    def steps(self) -> Steps[None]:
        """Spar-Reduce-Scatter, Spar-All-Gather, then the all-gather of the chunks of
        the mean.
        """
        ring = [self.team * self.size + place for place in self.order]
        if not self.is_kept:
            yield self._compute("encode", range(self.size), self._begin)
        for distance, count in rounds(self.size):
            away = range(distance, distance + count)
            here = range(count)
            yield self._compute("encode", away, self._cut)
            yield (
                Send(ring[distance], self.sums.span(away)),
                Recv(ring[-distance], self.sums.span(here)),
                # Of these chunks the gradient has been read: the mean may take its
                # place.
                self._compute("decode", away, self._clear),
            )
            yield self._compute("merge", here, self._add)
        if self.teams == 1:
            yield self._compute(
                "encode", range(1), lambda _: self._finish(self._largest(0))
            )
        else:
            yield from self._add_up_teams()
        places = range(1)
        for distance, count in reversed(rounds(self.size)):
            landing = range(distance, distance + count)
            yield (
                Send(ring[-distance], self.means.span(range(count))),
                Recv(ring[distance], self.means.span(landing)),
                self._compute("decode", places, self._put),
            )
            places = landing
        yield self._compute("decode", places, self._put)

    def _add_up_teams(self) -> Steps[None]:
        """Spar-All-Gather: adds up the sums that all teams have of the own chunk.

        If teams are a power of two there are stages of two (R-SAG), else one stage of
        all (B-SAG). In a stage each rank gathers lists of ``width`` teams, and makes
        the same sum of them as the others. ``alike`` ranks held one sum before;
        ``width`` times as many hold one afterwards.
        """
        width = 2 if self.teams & (self.teams - 1) == 0 else self.teams
        chunks = self.chunks
        own_chunk = self.order[0]
        order = [own_chunk] * width
        lists = Shelf(self.me, chunks, order, "lists", chunks.sum_dtype, self.grad_N)
        yield self._compute(
            "encode", range(1), lambda _: lists.write(0, self._largest(0))
        )
        counted = chunks.counts[own_chunk]
        alike = 1
        while alike < self.teams:
            at = self.team // alike % width
            ahead = [(at + i) % width - at for i in range(width)]
            ring = [self.me.rank + steps * alike * self.size for steps in ahead]
            for distance, count in reversed(rounds(width)):
                here = range(count)
                landing = range(distance, distance + count)
                yield (
                    Send(ring[-distance], lists.span(here)),
                    Recv(ring[distance], lists.span(landing)),
                )
            alike *= width
            # By team and not by distance, so that sums have the same bits on all ranks.
            places = [(i - at) % width for i in range(width)]
            cut = partial(self._cut_alike, lists, places, alike)
            yield self.me.sized("merge", cut, width * counted)
        yield self.me.sized("encode", lambda: self._finish(*lists.read(0)), counted)

    def _cut_alike(self, lists: Shelf, places: Sequence[int], alike: int) -> None:
        """Adds lists of the own chunk up, and cuts the sum to its largest elements.

        ``alike`` ranks do the same. Each keeps its part of the elements that are cut.
        """
        count = self.chunks.counts[self.order[0]]
        pending_L = self.pending_N[self._elements(0)]
        most = len(places) * count
        room = (
            self.me.thread_scratch("sum places", most, pending_L, torch.int32),
            self.me.thread_scratch("sum values", most, pending_L, pending_L.dtype),
        )
        parts = lists.read(*places)
        indices_S, sums_S, _ = merge(parts, pending_L.numel(), room=room)
        chosen_K = self.me.thread_scratch("chosen", count, pending_L, torch.int32)
        values_K = self.me.thread_scratch("values", count, pending_L, pending_L.dtype)
        rest_S = torch.zeros_like(sums_S)
        select.topk(sums_S, chosen_K, values_K, rest_S)
        lists.write(0, Entries(indices_S[chosen_K], values_K))
        kept_S = self._is_kept_here(indices_S, alike)
        indices_R = indices_S[kept_S]
        rest_R = rest_S[kept_S]
        # Two finite elements may add up to one that is not.
        sums_R = (pending_L[indices_R] + rest_R).nan_to_num_(
            nan=0.0, posinf=0.0, neginf=0.0
        )
        pending_L[indices_R] = sums_R

    def _is_kept_here(self, indices_S: Tensor, alike: int) -> Tensor:
        """Whether this rank is the one, of ``alike`` ranks, that keeps an element which
        is cut.
        """
        return indices_S % alike == self.team % alike

    def _compute(
        self, name: str, places: range, work: Callable[[range], None]
    ) -> Compute:
        """``work`` on the chunks at these places."""
        numel = sum(self.chunks.length(self.order[place]) for place in places)
        return self.me.sized(name, partial(work, places), numel)

    def _elements(self, place: int) -> slice:
        """Where the chunk at a place lies in the gradient."""
        return slice(*self.chunks.bounds[self.order[place]])

    def _begin(self, places: range) -> None:
        self.pending_N.zero_()

    def _cut(self, places: range) -> None:
        """Takes the largest elements of these chunks, with what came for them, to be
        sent.
        """
        for place in places:
            self.sums.write(place, self._largest(place))

    def _largest(self, place: int) -> Entries:
        elements = self._elements(place)
        grad_L = as_working(self.grad_N[elements])
        pending_L = self.pending_N[elements]
        count = self.chunks.counts[self.order[place]]
        indices_K = self.me.thread_scratch("places", count, pending_L, torch.int32)
        values_K = self.me.thread_scratch("values", count, pending_L, pending_L.dtype)
        select.topk(grad_L, indices_K, values_K, pending_L)
        return Entries(indices_K, values_K)

    def _add(self, places: range) -> None:
        """Adds what came to what this rank holds of these chunks."""
        for place in places:
            pending_L = self.pending_N[self._elements(place)]
            [came] = self.sums.read(place)
            select.scatter_add(came.indices_K, came.values, pending_L)

    def _finish(self, sums: Entries) -> None:
        """Makes the mean of the own chunk, whose sum is whole now."""
        indices_K, sums_K, _ = sums
        mean_K = sums_K.mul_(1 / self.me.world).to(self.chunks.dtype)
        self.means.write(0, Entries(indices_K, mean_K))

    def _clear(self, places: range) -> None:
        for place in places:
            self.out_N[self._elements(place)].zero_()

    def _put(self, places: range) -> None:
        """Writes the mean of these chunks."""
        if 0 in places:
            self._clear(range(1))
        for place in places:
            out_L = self.out_N[self._elements(place)]
            [mean] = self.means.read(place)
            scatter_entries(mean, Part(out_L.numel()), out_L)
