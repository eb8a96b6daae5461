"""Candidates: plans of one blend, each by a few numbers, so that a search can go
through all of them.

A blend has one exchange beside the dense one, or none. The first tensors in backward
order may stay dense, which the backward pass may hide, and which leaves the compute
lane free. Of the others matrices go through the exchange, and vectors stay dense and
travel together. Each of these streams is cut into messages of equal length, in the
order of readiness or, where the next forward pass is overlapped, of urgency.

Letters: T tensors in backward order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product, starmap
from math import inf
from operator import itemgetter
from typing import NamedTuple

import torch

from ....compress.none import none
from ....contract import Exchange
from ....contract.spec import CHUNK_ALIGNMENT
from ....errors import InvalidSetting
from ....exchange.by_name import exchange_for
from ....exchange.planned import exchange_of_setting
from ....exchange.two_level import on_hosts
from ...data.cluster import Cluster
from ...data.plan import DENSE, Chunk, ExchangeSetting, Plan, PlannedMessage
from ...data.profile import Profile, ProfiledTensor
from ...default_fusion import DEFAULT_CHANNELS, default_messages
from ...price import iteration_s
from ...simulation.clock import Iteration
from ...simulation.closed_form import backward_ends, carry
from ...simulation.network import HAIR
from ...simulation.representative import estimate
from ...simulation.supersteps import (
    MOST_PLAYED,
    Superstep,
    Tariff,
    all_reduce,
    is_all_reduce,
)

# ---- candidates ----------------------------------------------------------------------


FEW = 4
"""The most ranks for which what ``attach`` sends by default is counted."""


class Candidate(NamedTuple):
    """The numbers that a plan of a blend is made from."""

    num_messages: int
    """The messages of all gradients or, where there is an exchange, of all matrices."""
    credit: int
    overlap_forward: bool
    dense_share: float = 0.0
    """The share of all bytes, from the first gradient on, that stays dense."""
    is_default: bool = False
    """Whether messages are the ones that ``attach`` makes without a plan.

    The other fields do not matter then.
    """


class DraftedRange(NamedTuple):
    """Elements ``start`` up to ``stop`` of the tensor at a place in backward order."""

    place: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


Ranges = tuple[DraftedRange, ...]


class CandidateMessage(NamedTuple):
    """A candidate's message: ranges in backward order, and its exchange's name."""

    ranges: Ranges
    exchange: str


@dataclass(frozen=True)
class Blend:
    """The dense exchange and at most one other, for one model on one cluster."""

    profile: Profile
    cluster: Cluster
    name: str = DENSE
    setting: ExchangeSetting | None = None
    """The other exchange; None where all is dense."""

    @cached_property
    def tensors(self) -> list[tuple[ProfiledTensor, int]]:
        """All tensors with elements in backward order, each with its layer's number."""
        return [
            (tensor, place)
            for place, layer in reversed(list(enumerate(self.profile.layers)))
            for tensor in reversed(layer.tensors)
            if tensor.numel
        ]

    @cached_property
    def ends_s(self) -> list[float]:
        return backward_ends(self.profile, self.cluster)

    @cached_property
    def exchange(self) -> Exchange:
        """The other exchange, as hosts carry it out; there is one."""
        assert self.setting is not None
        return on_hosts(exchange_of_setting(self.setting), self.cluster.ranks_per_host)

    @cached_property
    def tariff(self) -> Tariff:
        """The prices that the cluster asks of the other exchange."""
        return Tariff.of(self.exchange, self.cluster.evened)

    @cached_property
    def dense(self) -> Exchange:
        """The dense exchange, as hosts carry it out."""
        return on_hosts(exchange_for(none()), self.cluster.ranks_per_host)

    @cached_property
    def dense_tariff(self) -> Tariff:
        """The prices that the cluster asks of the dense exchange."""
        return Tariff.of(self.dense, self.cluster.evened)

    @property
    def is_possible(self) -> bool:
        """Whether the exchange can be simulated here.

        One that looks at values cannot.

        More ranks than can be played none knows.
        """
        if self.setting is None:
            return True
        if self.cluster.num_ranks > MOST_PLAYED:
            return False
        try:
            estimate(self.exchange, 64, torch.float32, self.tariff)
        except InvalidSetting:
            return False
        return True

    def messages(self, candidate: Candidate) -> list[CandidateMessage]:
        """The messages of a candidate in issue order."""
        if candidate.is_default:
            return self._default
        messages = list(self._messages(candidate))
        if not candidate.overlap_forward:
            return sorted(messages, key=lambda message: -self._first_layer(message))
        urgency = [self._first_layer(message) for message in messages]
        ready_s = [self.ends_s[layer] for layer in urgency]
        costs = []
        for message in messages:
            supersteps = self._supersteps(message)
            (joint,) = (verb for step in supersteps for verb in step.wire)
            first_s, last_s = (
                sum(w.seconds for w in supersteps[at].works) for at in (0, -1)
            )
            costs.append((first_s + joint.price.latency_s, joint.price.work_s + last_s))
        carried = carry(ready_s, costs, candidate.credit, urgency=urgency)
        return [messages[place] for place in carried.order]

    @cached_property
    def _default(self) -> list[CandidateMessage]:
        """The messages that ``attach`` makes with the exchange and without a plan."""
        assert self.setting is not None
        # With more ranks each sends hardly more, and to count it tensor by tensor takes
        # seconds.
        num_hosts = min(self.cluster.across.num_ranks, FEW)
        exchange = exchange_of_setting(self.setting)
        places = {tensor.name: place for place, (tensor, _) in enumerate(self.tensors)}
        params = [
            (
                one.name,
                torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta"),
            )
            for one, _ in reversed(self.tensors)
        ]
        messages = []
        for members, made in default_messages(params, exchange, num_hosts):
            whole = (
                DraftedRange(places[name], 0, param.numel()) for name, param in members
            )
            messages.append(
                CandidateMessage(tuple(whole), self.name if made == exchange else DENSE)
            )
        return messages

    def _messages(self, candidate: Candidate) -> Iterator[CandidateMessage]:
        """The messages of a candidate, each stream's in backward order."""
        every = [
            DraftedRange(place, 0, tensor.numel)
            for place, (tensor, _) in enumerate(self.tensors)
        ]
        share = 1.0 if self.setting is None else candidate.dense_share
        upto_bytes = list(accumulate(tensor.size_bytes for tensor, _ in self.tensors))
        num_first = bisect_right(upto_bytes, share * upto_bytes[-1]) if every else 0
        num_dense = max(1, round(share * candidate.num_messages))
        for ranges in self._cut(every[:num_first], num_dense, is_whole=False):
            yield CandidateMessage(ranges, DENSE)
        if self.setting is None:
            return
        rest = every[num_first:]
        shapes = [tensor.shape for tensor, _ in self.tensors]
        vectors = [drafted for drafted in rest if len(shapes[drafted.place]) < 2]
        matrices = [drafted for drafted in rest if len(shapes[drafted.place]) > 1]
        is_whole = self.exchange.declared.whole_tensors
        for ranges in self._cut(matrices, candidate.num_messages, is_whole=is_whole):
            yield CandidateMessage(ranges, self.name)
        for ranges in self._cut(vectors, 1, is_whole=True):
            yield CandidateMessage(ranges, DENSE)

    def _cut(
        self, every: Sequence[DraftedRange], count: int, *, is_whole: bool
    ) -> Iterator[Ranges]:
        """Ranges in about ``count`` messages of one dtype each, as equal as may be."""
        total = sum(drafted.numel for drafted in every)
        by_dtype: dict[str, list[DraftedRange]] = {}
        for drafted in every:
            by_dtype.setdefault(self.tensors[drafted.place][0].dtype, []).append(
                drafted
            )
        # then the chunks of all ranks are alike
        even = CHUNK_ALIGNMENT * self.cluster.num_ranks
        length = max(1, -(-total // count // even) * even)
        for same_dtype in by_dtype.values():
            filled = 0
            ranges = list[DraftedRange]()
            for place, start, stop in same_dtype:
                while start < stop:
                    until = stop if is_whole else min(stop, start + length - filled)
                    ranges.append(DraftedRange(place, start, until))
                    filled = filled + until - start
                    start = until
                    if filled >= length:
                        yield tuple(ranges)
                        filled = 0
                        ranges = []
            if ranges:
                yield tuple(ranges)

    def _first_layer(self, message: CandidateMessage) -> int:
        return self.tensors[message.ranges[-1].place][1]

    def _supersteps(self, message: CandidateMessage) -> tuple[Superstep, ...]:
        numel = sum(drafted.numel for drafted in message.ranges)
        first = self.tensors[message.ranges[0].place][0]
        dtype = getattr(torch, first.dtype)
        if message.exchange != DENSE:
            return estimate(self.exchange, numel, dtype, self.tariff)
        if is_all_reduce(dtype, self.cluster):
            return (all_reduce(numel * dtype.itemsize, self.cluster),)
        return estimate(self.dense, numel, dtype, self.dense_tariff)

    def seconds(self, candidate: Candidate) -> float:
        """About what ``price.iteration_s`` says of the candidate's plan.

        Infinite where a message holds more elements than the exchange takes.
        """
        try:
            return self._seconds(candidate)
        except InvalidSetting:
            return inf

    def _seconds(self, candidate: Candidate) -> float:
        messages = self.messages(candidate)
        iteration = Iteration(
            self.profile,
            self.cluster,
            [
                {self.tensors[place][1] for place, _, _ in message.ranges}
                for message in messages
            ],
            candidate.credit,
            candidate.overlap_forward,
            [0] * len(messages),
            [""] * len(messages),
        )
        return iteration.timings([[self._supersteps(message) for message in messages]])[
            0
        ].iteration_s

    def exact_s(self, candidate: Candidate) -> float:
        """Seconds of an iteration of the candidate's plan."""
        return iteration_s(self.plan(candidate), self.profile, self.cluster)

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate."""
        messages = [
            PlannedMessage(
                chunks=tuple(
                    Chunk(tensor=self.tensors[place][0].name, start=start, stop=stop)
                    for place, start, stop in message.ranges
                ),
                exchange=message.exchange,
            )
            for message in self.messages(candidate)
        ]
        is_used = any(message.exchange != DENSE for message in messages)
        return Plan(
            planner=self.name,
            model=self.profile.model,
            messages=tuple(messages),
            credit=candidate.credit,
            overlap_forward=candidate.overlap_forward,
            exchanges={self.name: self.setting} if self.setting and is_used else {},
        )


DEFAULT = Candidate(1, DEFAULT_CHANNELS, False, is_default=True)
"""The candidate of what ``attach`` does with a blend's exchange and without a plan."""


# ---- The search for a blend's best candidate -----------------------------------------

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CREDITS = (2, 4)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Values that are tried: of messages, of messages at once and of dense shares."""


def first_seconds(blend: Blend) -> float:
    """The least seconds of a few candidates, which tell the blend to go into."""
    return min(blend.seconds(Candidate(count, 2, False)) for count in (2, 8, 24))


def best_candidate(blend: Blend, overlaps: Sequence[bool]) -> tuple[float, Candidate]:
    """The candidate of least seconds.

    ``overlaps`` says whether it may overlap the next forward.

    Of candidates that differ by rounding alone it is the one whose plan takes the least
    time.
    """

    def priced(every: Iterable[Candidate]) -> list[tuple[float, Candidate]]:
        return [(blend.seconds(candidate), candidate) for candidate in every]

    best = min(
        priced(starmap(Candidate, product(NUMBERS, CREDITS, overlaps))),
        key=itemgetter(0),
    )
    if blend.setting is None:
        return best
    every = priced(
        best[1]._replace(num_messages=n, dense_share=s) for s in SHARES for n in NUMBERS
    )
    least_s = min(seconds for seconds, _ in every)
    tied = [
        candidate for seconds, candidate in every if seconds <= least_s * (1 + HAIR)
    ]
    return least_s, min(tied, key=blend.exact_s) if len(tied) > 1 else tied[0]
