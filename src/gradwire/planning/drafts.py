"""Drafts: plans of one blend, each by a few numbers, so that a search can go through many of them.

A blend has one exchange beside the dense one, or two. The first tensors in backward order stay
dense, which the backward pass may hide. Of the others matrices go through the exchange and vectors
stay dense. Of two exchanges the second takes the first of these matrices, or the last: one that
encodes fast leaves the compute lane to one that sends less. Each of these streams is cut into
messages of equal length, sent in the order of readiness or, where the next forward pass is
overlapped, of urgency.

Letters: T tensors in backward order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..contract import Exchange
from ..contract.spec import CHUNK_ALIGNMENT
from ..errors import InvalidSetting
from ..exchange.hosts import on_hosts
from .clock.clock import UNHINDERED, ByPriority, FixedOrder, backward_ends, carry, forward_times
from .clock.engine import Traffic, play
from .clock.pace import Pace, missing_s
from .clock.representative import MANY, MessageParts, parts_between, supersteps_of_parts
from .clock.supersteps import MOST_PLAYED, Tariff
from .data.cluster import Cluster
from .data.plan import DENSE, Chunk, ExchangeSetting, Plan, PlannedMessage
from .data.profile import Profile, ProfiledTensor
from .default_fusion import DEFAULT_CHANNELS, default_messages
from .exchanges import exchange_of_setting

# ---- drafts ------------------------------------------------------------------------------------


FEW = 4
"""The most ranks for which what ``attach`` sends by default is counted."""


class SecondPart(NamedTuple):
    """The part of the matrices that goes through a blend's second exchange."""

    share: float
    is_last: bool
    """Whether it is the last of them in backward order, or the first."""


class Draft(NamedTuple):
    """The numbers that a plan of a blend is made from."""

    dense_share: float
    """The share of all bytes, from the first gradient on, that stays dense."""
    num_dense: int
    """The messages that these travel in."""
    num_pieces: int
    """The messages of what goes through the exchange."""
    vectors_last: bool
    """Whether the other vectors travel together, and not behind the piece that they came with."""
    credit: int
    overlap_forward: bool
    second: SecondPart = SecondPart(0.0, False)
    num_second: int = 1
    """The messages of what goes through the second exchange."""
    is_default: bool = False
    """Whether messages are those that ``attach`` makes without a plan, whatever else is here."""


class DraftedRange(NamedTuple):
    """Elements ``start`` up to ``stop`` of the tensor at a place in backward order."""

    place: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


Ranges = tuple[DraftedRange, ...]


class DraftedMessage(NamedTuple):
    """A message of a draft: ranges of tensors in backward order, and its exchange's name."""

    ranges: Ranges
    exchange: str


@dataclass(frozen=True)
class Blend:
    """Up to two exchanges beside the dense one, by name, for one model on one cluster."""

    profile: Profile
    cluster: Cluster
    settings: tuple[tuple[str, ExchangeSetting], ...] = ()

    @property
    def name(self) -> str:
        return " beside ".join(name for name, _ in self.settings) or DENSE

    def beside(self, other: Blend) -> Blend:
        """This one's exchange, with another one's as the second."""
        return Blend(self.profile, self.cluster, (*self.settings, *other.settings))

    @cached_property
    def tensors(self) -> list[tuple[ProfiledTensor, int]]:
        """All tensors that hold elements in backward order, each with its layer's number."""
        return [
            (tensor, place)
            for place, layer in reversed(list(enumerate(self.profile.layers)))
            for tensor in reversed(layer.tensors)
            if tensor.numel
        ]

    @cached_property
    def ends_s(self) -> list[float]:
        return backward_ends(self.profile)

    @cached_property
    def exchanges(self) -> dict[str, tuple[Exchange, Tariff]]:
        """Every exchange, and what it is asked for on the cluster, by name."""
        count = self.cluster.ranks_per_host
        made = {name: on_hosts(exchange_of_setting(one), count) for name, one in self.settings}
        return {name: (one, Tariff.of(one, self.cluster)) for name, one in made.items()}

    @property
    def is_possible(self) -> bool:
        """Whether exchanges can be simulated here, which one that looks at values cannot.

        Hosts of several ranks cut every tensor, and more ranks than can be played none knows.
        """
        is_cut = self.cluster.ranks_per_host > 1
        if self.cluster.num_ranks > MOST_PLAYED or (
            is_cut and any(exchange_of_setting(one).keeps_whole for _, one in self.settings)
        ):
            return False
        try:
            for exchange, tariff in self.exchanges.values():
                parts_between(exchange, 64, torch.float32, tariff)
        except InvalidSetting:
            return False
        return True

    @cached_property
    def upto_bytes_T(self) -> list[int]:
        """Bytes of the tensors up to each place, that one among them."""
        return list(accumulate(tensor.size_bytes for tensor, _ in self.tensors))

    def messages(self, draft: Draft) -> list[DraftedMessage]:
        """The messages of a draft in issue order."""
        if draft.is_default:
            return self._default
        found = list(self._messages(draft))
        if not draft.overlap_forward:
            return sorted(found, key=lambda one: -self._first_layer(one))
        urgency = [self._first_layer(one) for one in found]
        ready_s = [self.ends_s[layer] for layer in urgency]
        costs = []
        for one in found:
            parts = self._parts(one)
            costs.append((parts.before_s + parts.latency_s, parts.work_s + parts.after_s))
        carried = carry(ByPriority(ready_s, urgency), costs, draft.credit)
        return [found[place] for place in carried.order]

    @cached_property
    def _default(self) -> list[DraftedMessage]:
        """The messages that ``attach`` makes with the first exchange and without a plan."""
        name, setting = self.settings[0]
        # With more ranks each sends hardly more, and to count it tensor by tensor takes seconds.
        num_hosts = min(self.cluster.across.num_ranks, FEW)
        exchange = exchange_of_setting(setting)
        places = {tensor.name: place for place, (tensor, _) in enumerate(self.tensors)}
        params = [
            (one.name, torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta"))
            for one, _ in reversed(self.tensors)
        ]
        found = []
        for members, made in default_messages(params, exchange, num_hosts):
            whole = (DraftedRange(places[one], 0, param.numel()) for one, param in members)
            found.append(DraftedMessage(tuple(whole), name if made == exchange else DENSE))
        return found

    def _messages(self, draft: Draft) -> Iterator[DraftedMessage]:
        """The messages of a draft, those of each stream in backward order."""
        limit_bytes = draft.dense_share * self.upto_bytes_T[-1] if self.tensors else 0.0
        first, matrices, vectors = list[DraftedRange](), list[DraftedRange](), list[DraftedRange]()
        for place, (tensor, _) in enumerate(self.tensors):
            whole = DraftedRange(place, 0, tensor.numel)
            if not self.settings or self.upto_bytes_T[place] <= limit_bytes:
                first.append(whole)
            else:
                (matrices if len(tensor.shape) > 1 else vectors).append(whole)
        for ranges in self._cut(first, draft.num_dense, is_whole=False):
            yield DraftedMessage(ranges, DENSE)
        pieces = list(self._pieces(matrices, draft))
        if vectors and self.cluster.num_ranks >= MANY:
            trimmed = [(self._trimmed(one), one.exchange) for one in pieces]
            pieces = [DraftedMessage(kept, name) for (kept, _), name in trimmed if kept]
            vectors = sorted((*vectors, *(one for (_, left), _ in trimmed for one in left)))
        yield from pieces
        lasts = [] if draft.vectors_last else [one.ranges[-1].place for one in pieces[:-1]]
        for last, before in zip((*lasts, len(self.tensors)), (-1, *lasts), strict=True):
            beside = [one for one in vectors if before < one.place <= last]
            for ranges in self._cut(beside, 1, is_whole=True):
                yield DraftedMessage(ranges, DENSE)

    def _pieces(self, matrices: list[DraftedRange], draft: Draft) -> Iterator[DraftedMessage]:
        """The messages of what goes through exchanges, in backward order."""
        names, counts, parts = list(self.exchanges), [draft.num_pieces], [matrices]
        if len(names) > 1:
            share, is_last = draft.second
            counts.append(draft.num_second)
            if not is_last:
                names, counts = names[::-1], counts[::-1]
            upto = list(accumulate(one.numel for one in matrices)) or [0]
            at = bisect_right(upto, (1 - share if is_last else share) * upto[-1])
            parts = [matrices[:at], matrices[at:]]
        for name, count, part in zip(names, counts, parts, strict=False):
            is_whole = self.exchanges[name][0].keeps_whole
            for ranges in self._cut(part, count, is_whole=is_whole):
                yield DraftedMessage(ranges, name)

    @property
    def _even(self) -> int:
        """Elements of which messages hold multiples, so that the chunks of ranks are alike."""
        return CHUNK_ALIGNMENT * self.cluster.num_ranks

    def _cut(
        self, every: Sequence[DraftedRange], count: int, *, is_whole: bool
    ) -> Iterator[Ranges]:
        """Ranges in about ``count`` messages of one dtype each, as equal as may be."""
        total = sum(one.numel for one in every)
        by_dtype: dict[str, list[DraftedRange]] = {}
        for one in every:
            by_dtype.setdefault(self.tensors[one.place][0].dtype, []).append(one)
        length = max(1, -(-total // count // self._even) * self._even)
        for own in by_dtype.values():
            held, ranges = 0, list[DraftedRange]()
            for place, start, stop in own:
                while start < stop:
                    until = stop if is_whole else min(stop, start + length - held)
                    ranges.append(DraftedRange(place, start, until))
                    held, start = held + until - start, until
                    if held >= length:
                        yield tuple(ranges)
                        held, ranges = 0, []
            if ranges:
                yield tuple(ranges)

    def _trimmed(self, message: DraftedMessage) -> tuple[Ranges, Ranges]:
        """A message's ranges up to a multiple of ``_even`` elements, and what is behind it.

        It takes seconds to price an exchange of many ranks whose chunks differ. One that takes
        tensors whole has no chunks.
        """
        if self.exchanges[message.exchange][0].keeps_whole:
            return message.ranges, ()
        room = sum(one.numel for one in message.ranges) // self._even * self._even
        kept, left = list[DraftedRange](), list[DraftedRange]()
        for place, start, stop in message.ranges:
            border = min(stop, start + room)
            room -= border - start
            kept += [DraftedRange(place, start, border)] * (border > start)
            left += [DraftedRange(place, border, stop)] * (stop > border)
        return tuple(kept), tuple(left)

    def _first_layer(self, message: DraftedMessage) -> int:
        return self.tensors[message.ranges[-1].place][1]

    def _parts(self, message: DraftedMessage) -> MessageParts:
        numel = sum(one.numel for one in message.ranges)
        first = self.tensors[message.ranges[0].place][0]
        if message.exchange != DENSE:
            exchange, tariff = self.exchanges[message.exchange]
            return parts_between(exchange, numel, getattr(torch, first.dtype), tariff)
        size_bytes = numel * (first.size_bytes // first.numel)
        latency_s, work_s = self.cluster.parts_s("all_reduce", size_bytes)
        sent_bytes = self.cluster.wire_bytes(size_bytes)
        return MessageParts(0.0, 0.0, latency_s, work_s, 0.0, sent_bytes, 1.0)

    def seconds(self, draft: Draft) -> float:
        """About what ``price.iteration_s`` says of the draft's plan."""
        messages = self.messages(draft)
        ready_s, soonest_s = [], 0.0
        for one in messages:
            soonest_s = max(soonest_s, self.ends_s[self._first_layer(one)])
            ready_s.append(soonest_s)
        every = [self._parts(one) for one in messages]
        if all(one.exchange == DENSE for one in messages):
            costs = [(parts.latency_s, parts.work_s) for parts in every]
            end_s, pace = carry(FixedOrder(ready_s), costs, draft.credit).end_s, UNHINDERED
        else:
            supersteps, beside = (
                [supersteps_of_parts(parts) for parts in every],
                self.cluster.beside,
            )
            labels = [""] * len(every)
            played = play(Traffic([supersteps], [ready_s], labels, draft.credit, beside=beside))
            end_s, pace = played.end_s[0], Pace.of(played.spans, beside)
        may_start_s = [pace.end_s(0.0, self.ends_s[0])] * len(self.profile.layers)
        for one, ended_s in zip(messages, end_s, strict=True):
            layers = {self.tensors[place][1] for place, _, _ in one.ranges}
            for layer in layers if draft.overlap_forward else (0,):
                may_start_s[layer] = max(may_start_s[layer], ended_s)
        forward_s = [layer.forward_s for layer in self.profile.layers]
        last_s = forward_times(forward_s, may_start_s, pace)[1][-1]
        return last_s + self._missing_s(last_s, every)

    def _missing_s(self, end_s: float, every: Sequence[MessageParts]) -> float:
        """Seconds by which messages of these parts need more of a rank's cores than it has."""
        own_s = self.ends_s[0] + self.profile.forward_s + sum(one.computing_s for one in every)
        carried_s = sum(
            one.num_verbs * self.cluster.busy_s(one.sent_bytes / one.num_verbs)
            for one in every
            if one.num_verbs
        )
        return missing_s(end_s, own_s, carried_s, self.cluster)

    def plan(self, draft: Draft) -> Plan:
        """The plan of a draft."""
        messages = [
            PlannedMessage(
                chunks=tuple(
                    Chunk(tensor=self.tensors[place][0].name, start=start, stop=stop)
                    for place, start, stop in one.ranges
                ),
                exchange=one.exchange,
            )
            for one in self.messages(draft)
        ]
        used = {message.exchange for message in messages} - {DENSE}
        return Plan(
            planner=self.name,
            model=self.profile.model,
            messages=tuple(messages),
            credit=draft.credit,
            overlap_forward=draft.overlap_forward,
            exchanges={name: one for name, one in self.settings if name in used},
        )


DEFAULT = Draft(0.0, 1, 1, False, DEFAULT_CHANNELS, False, is_default=True)
"""The draft of what ``attach`` does with a blend's exchange and without a plan."""


# ---- The search for a blend's best draft -------------------------------------------------------
#
# A climb, number by number.

CREDITS = (1, 2, 4)
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 1.0)
"""Values that are tried: of messages at once, of messages, and of the bytes that stay dense."""
SWEEPS = 3
"""The most times that each number of a draft is tried anew."""

FIRST = tuple(
    Draft(share, 2, count, True, 2, False) for share in (0.0, 0.3) for count in (2, 8, 24)
)
"""The drafts that tell which of several blends are worth a climb."""


def first_seconds(blend: Blend) -> float:
    """The least seconds of the first drafts."""
    return min(blend.seconds(draft) for draft in FIRST)


SECOND_PARTS = tuple(
    SecondPart(share, is_last) for is_last in (False, True) for share in SHARES[1:-1:2]
)
"""Parts that are tried of a blend's second exchange."""


def best_of_two(blend: Blend, start: Draft) -> tuple[float, Draft]:
    """The draft of least seconds with a second exchange that a climb from ``start`` finds.

    Only where some part of it gains at all the rest is gone into.
    """
    drafts = [
        start._replace(second=part, num_second=max(1, round(part.share * start.num_pieces)))
        for part in SECOND_PARTS
    ]
    seconds, best = min((blend.seconds(draft), draft) for draft in drafts)
    if seconds >= blend.seconds(start):
        return seconds, best
    values: dict[str, Sequence[Any]] = {
        "dense_share": SHARES,
        "num_pieces": NUMBERS,
        "num_second": NUMBERS,
        "second": SECOND_PARTS,
    }
    return _climb(blend, best, values)


def best_draft(blend: Blend, *, overlaps: Sequence[bool]) -> tuple[float, Draft]:
    """The draft of least seconds that a climb finds, number by number."""
    values: dict[str, Sequence[Any]] = {
        "overlap_forward": overlaps,
        "num_pieces": NUMBERS,
        "credit": CREDITS,
        "dense_share": SHARES,
        "num_dense": NUMBERS,
        "vectors_last": (True, False),
    }
    return _climb(blend, Draft(0.0, 4, 4, True, 2, overlaps[0]), values)


def _climb(blend: Blend, best: Draft, values: Mapping[str, Sequence[Any]]) -> tuple[float, Draft]:
    known = {best: blend.seconds(best)}
    for _ in range(SWEEPS):
        before = best
        for name, tried in values.items():
            for value in tried:
                other = best._replace(**{name: value})
                if other not in known:
                    known[other] = blend.seconds(other)
            best = min(known, key=lambda one: (known[one], one))
        if best == before:
            break
    return known[best], best
