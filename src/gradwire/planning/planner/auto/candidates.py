"""Candidates: plans of one blend, each by a few numbers, so that a search can go
through all of them.

A blend has one exchange beside the dense one, or none. The first tensors in backward
order may stay dense, which the backward pass may hide, and which leaves the compute
lane free. Of the others matrices go through the exchange, and vectors stay dense and
travel together. Each of these streams is cut into messages of equal length. Messages
are in the order of readiness, or of urgency if the next forward pass is overlapped.
"""

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
from ....exchange.planned import exchange_of_setting, planned_spec
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


@dataclass(frozen=True)
class Blend:
    """The dense exchange and at most one other, for one model on one cluster."""

    profile: Profile
    cluster: Cluster
    name: str = DENSE
    setting: ExchangeSetting | None = None
    """The other exchange; None where all is dense."""

    @cached_property
    def tensors(self) -> dict[str, ProfiledTensor]:
        """All tensors with elements by name, in backward order."""
        return {
            tensor.name: tensor
            for layer in reversed(self.profile.layers)
            for tensor in reversed(layer.tensors)
            if tensor.numel
        }

    @cached_property
    def layer_of(self) -> dict[str, int]:
        """The number of each tensor's layer, by the tensor's name."""
        return self.profile.layer_of

    @cached_property
    def ends_s(self) -> list[float]:
        """The second at which the backward pass of each layer ends."""
        return backward_ends(self.profile, self.cluster)

    @cached_property
    def exchanges(self) -> dict[str, Exchange]:
        """The exchanges by their names, as hosts carry them out."""
        made = {DENSE: exchange_for(none())}
        if self.setting is not None:
            made[self.name] = exchange_of_setting(self.setting)
        return {
            name: on_hosts(exchange, self.cluster.ranks_per_host)
            for name, exchange in made.items()
        }

    @cached_property
    def tariffs(self) -> dict[str, Tariff]:
        """The prices that the cluster asks of each exchange."""
        even = self.cluster.evened
        return {name: Tariff.of(made, even) for name, made in self.exchanges.items()}

    @property
    def is_possible(self) -> bool:
        """Whether the exchange can be simulated here.

        An exchange that looks at values cannot, and none can among too many ranks.
        """
        if self.setting is None:
            return True
        if self.cluster.num_ranks > MOST_PLAYED:
            return False
        try:
            self._estimate(self.name, 64, torch.float32)
        except InvalidSetting:
            return False
        return True

    def _estimate(
        self, name: str, numel: int, dtype: torch.dtype
    ) -> tuple[Superstep, ...]:
        return estimate(self.exchanges[name], numel, dtype, self.tariffs[name])

    def messages(self, candidate: Candidate) -> list[PlannedMessage]:
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
    def _default(self) -> list[PlannedMessage]:
        """The messages that ``attach`` makes with the exchange and without a plan."""
        assert self.setting is not None
        # With more ranks each sends hardly more, and to count it tensor by tensor takes
        # seconds.
        num_hosts = min(self.cluster.across.num_ranks, FEW)
        exchange = exchange_of_setting(self.setting)
        params = [
            (
                name,
                torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta"),
            )
            for name, one in reversed(self.tensors.items())
        ]
        return [
            PlannedMessage(
                chunks=tuple(self._whole(name) for name, _ in members),
                exchange=self.name if made == exchange else DENSE,
            )
            for members, made in default_messages(params, exchange, num_hosts)
        ]

    def _whole(self, name: str) -> Chunk:
        return Chunk(tensor=name, start=0, stop=self.tensors[name].numel)

    def _messages(self, candidate: Candidate) -> Iterator[PlannedMessage]:
        """The messages of a candidate, each stream's in backward order."""
        names = list(self.tensors)
        share = 1.0 if self.setting is None else candidate.dense_share
        upto_bytes = list(accumulate(one.size_bytes for one in self.tensors.values()))
        num_first = bisect_right(upto_bytes, share * upto_bytes[-1]) if names else 0
        num_dense = max(1, round(share * candidate.num_messages))
        yield from self._cut(names[:num_first], num_dense, DENSE)
        rest = names[num_first:]
        vectors = [name for name in rest if len(self.tensors[name].shape) < 2]
        matrices = [name for name in rest if len(self.tensors[name].shape) > 1]
        yield from self._cut(matrices, candidate.num_messages, self.name)
        yield from self._cut(vectors, 1, DENSE, is_whole=True)

    def _cut(
        self, names: Sequence[str], count: int, exchange: str, *, is_whole: bool = False
    ) -> Iterator[PlannedMessage]:
        """About ``count`` messages of one dtype each, as equal as may be."""
        is_whole = is_whole or self.exchanges[exchange].declared.whole_tensors
        total = sum(self.tensors[name].numel for name in names)
        by_dtype: dict[str, list[str]] = {}
        for name in names:
            by_dtype.setdefault(self.tensors[name].dtype, []).append(name)
        # then the chunks of all ranks are alike
        even = CHUNK_ALIGNMENT * self.cluster.num_ranks
        length = max(1, -(-total // count // even) * even)
        for same_dtype in by_dtype.values():
            filled = 0
            chunks = []
            for name in same_dtype:
                start = 0
                stop = self.tensors[name].numel
                while start < stop:
                    until = stop if is_whole else min(stop, start + length - filled)
                    chunks.append(Chunk(tensor=name, start=start, stop=until))
                    filled = filled + until - start
                    start = until
                    if filled >= length:
                        yield PlannedMessage(chunks=tuple(chunks), exchange=exchange)
                        filled = 0
                        chunks = []
            if chunks:
                yield PlannedMessage(chunks=tuple(chunks), exchange=exchange)

    def _first_layer(self, message: PlannedMessage) -> int:
        return self.layer_of[message.chunks[-1].tensor]

    def _supersteps(self, message: PlannedMessage) -> tuple[Superstep, ...]:
        spec = planned_spec(message, self.tensors, is_shaped=False)
        if message.exchange == DENSE and is_all_reduce(spec.dtype, self.cluster):
            return (all_reduce(spec.size_bytes, self.cluster),)
        return self._estimate(message.exchange, spec.numel, spec.dtype)

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
                {self.layer_of[chunk.tensor] for chunk in message.chunks}
                for message in messages
            ],
            candidate.credit,
            candidate.overlap_forward,
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
        messages = self.messages(candidate)
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
