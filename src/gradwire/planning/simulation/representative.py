"""The representative rank: all ranks of a plan's iteration for the price of one.

An exchange is played once on all ranks, with nothing else on the network; where all do the same,
one of them is priced with the others always there. The slowest rank's supersteps then stand for
every rank, but a stretch of verbs for the network becomes one collective that takes as long as the
stretch took alone. The seconds in which its links were in use are shared with other messages; the
rest is latency.

Ranks of a host that exchange whole tensors wait for the one with the largest, in each message for
another. With four messages at once, PowerSGD's VGG16 on hosts of two ranks takes a tenth longer
than is said here."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from ...contract import Exchange
from ...contract.shapes_only import record
from ...contract.spec import TensorSpec, squarest
from ...contract.verbs import Among, Recv, Send
from ...errors import InvalidSetting
from .events import Traffic, play
from .supersteps import (
    MOST_PLAYED,
    Hop,
    Joint,
    Price,
    Superstep,
    Tariff,
    Work,
    supersteps_of,
    supersteps_of_rank,
)

# ---- Alike -------------------------------------------------------------------------------------
#
# Ranks that all do the same, of which one can be priced without the others.
#
# No rank then keeps another one waiting. Where they send to each other, each sends to the rank so
# far ahead, and takes as much at the same time from the one so far behind. So the link of each
# serves one rank's verbs alone, and what takes seconds to play on 64 ranks takes milliseconds.


def supersteps_of_alike(
    exchange: Exchange, spec: TensorSpec, tariff: Tariff
) -> tuple[Superstep, ...] | None:
    """The supersteps of rank 0 if all ranks do the same, as seen from their own place.

    None where they do not, and where it is quicker to play them. Of ranks that send to each other
    four are looked at, as a text among many takes long by itself.
    """
    world = tariff.num_ranks
    if world > MOST_ALIKE:
        return None
    # Not of fewer ranks where all can be played: an exchange may be one for no fewer than these.
    for count in sorted({_FEW if world > MOST_PLAYED else world, world}):
        try:
            found = record(exchange, spec, 0, count)
        except InvalidSetting:  # as of teams that divide all ranks, and not so few
            if count == world:
                raise
            continue
        has_hops = any(isinstance(verb, Send | Recv) for row in found.rows for verb in row)
        is_joint = not found.is_of_its_rank and not has_hops
        if not is_joint and (tariff.ranks_per_host > 1 or not MANY <= world <= MOST_PLAYED):
            return None
    first = supersteps_of_rank(exchange, spec, tariff)
    if is_joint:
        return first
    seen = _from_own_place(first, 0, tariff)
    for rank in (1, world // 2, world - 1):
        own = supersteps_of_rank(exchange, spec, tariff, rank)
        if _from_own_place(own, rank, tariff) != seen:
            return None
    return first if all(_is_shift(one.wire, world) for one in first) else None


MANY = 16
"""From so many ranks on it is worth while to find out whether those that send do the same."""
MOST_ALIKE = 8 * MOST_PLAYED
"""The most ranks that one stands for: its text still counts the payloads of all."""
_FEW = 4
"""Ranks of which a text is looked at first, as one for very many may take long by itself."""


def supersteps_by_stretches(
    exchange: Exchange, spec: TensorSpec, tariff: Tariff
) -> list[tuple[Superstep, ...]]:
    """``supersteps_of``; of ``MANY`` ranks or more that do the same, only some are looked at.

    A stretch of ranks does the same if its first two, its middle and its last do, as seen from
    their own place. Where a chunk of a gradient is shorter than others, only ranks near it differ.
    """
    if not MANY <= tariff.num_ranks <= MOST_PLAYED:
        return supersteps_of(exchange, spec, tariff)
    own = dict[int, tuple[Superstep, ...]]()

    @cache
    def seen(rank: int) -> tuple[Superstep, ...]:
        own[rank] = supersteps_of_rank(exchange, spec, tariff, rank)
        return _from_own_place(own[rank], rank, tariff)

    stretches = [(0, tariff.num_ranks - 1)]
    while stretches:
        first, last = stretches.pop()
        middle = (first + last) // 2
        if all(seen(rank) == seen(first) for rank in (last, first + 1, middle)):
            for rank in range(first + 1, last):
                own.setdefault(rank, _moved(own[first], first, rank, tariff))
        elif last > first + 1:
            stretches += [(first, middle), (middle, last)]
    return [own[rank] for rank in range(tariff.num_ranks)]


def _from_own_place(
    supersteps: tuple[Superstep, ...], rank: int, tariff: Tariff
) -> tuple[Superstep, ...]:
    """The supersteps as if the rank were rank 0, with their hops in the order of their peers."""
    return tuple(
        one._replace(wire=tuple(sorted(one.wire, key=_by_peer)))
        for one in _moved(supersteps, rank, 0, tariff)
    )


def _by_peer(verb: Hop | Joint) -> tuple[bool, int]:
    return (not verb.sends, verb.peer) if isinstance(verb, Hop) else (False, -1)


def _moved(
    supersteps: tuple[Superstep, ...], rank: int, to: int, tariff: Tariff
) -> tuple[Superstep, ...]:
    """The supersteps of a rank as those of another one, whose peers are as far from it."""

    def moved(verb: Hop | Joint) -> Hop | Joint:
        if isinstance(verb, Joint):
            return verb
        old, new = (tariff.members(one, verb.among) for one in (rank, to))
        away = old.index(verb.peer) - old.index(rank)
        return verb._replace(peer=new[(new.index(to) + away) % len(new)])

    return tuple(one._replace(wire=tuple(map(moved, one.wire))) for one in supersteps)


def _is_shift(wire: tuple[Hop | Joint, ...], world: int) -> bool:
    """Whether every send of rank 0 is met by the same rank's other neighbour, beside no others."""
    hops = [verb for verb in wire if isinstance(verb, Hop)]
    sent = sorted((hop.peer, hop.size_bytes) for hop in hops if hop.sends)
    taken = sorted((-hop.peer % world, hop.size_bytes) for hop in hops if not hop.sends)
    return sent == taken and (not hops or len(hops) == len(wire))


def alone_on(wire: tuple[Hop | Joint, ...], ranks_per_host: int = 1) -> Price:
    """Seconds of latency, and of a link that serves nothing else, for verbs that run at once.

    Its two directions are busy at the same time; a collective keeps both busy. All ranks of a host
    exchange shares with other hosts at once. What they send each other is latency to their link.
    """
    sends_s = receives_s = together_s = 0.0
    for verb in wire:
        if isinstance(verb, Joint):
            together_s += verb.price.work_s
        elif verb.sends:
            sends_s += verb.price.work_s
        else:
            receives_s += verb.price.work_s
    latency_s = max(verb.price.latency_s for verb in wire)
    work_s = together_s + max(sends_s, receives_s)
    if wire[0].among is Among.HOST:
        return Price(latency_s + work_s, 0.0)
    return Price(latency_s, work_s * (ranks_per_host if wire[0].among is Among.HOSTS else 1))


# ---- Curves ------------------------------------------------------------------------------------
#
# Costs of an exchange's messages, between sizes of which one rank was looked at.
#
# They serve planners that compare hundreds of plans of a kind. The simulator plays each size on all
# ranks, which among many takes seconds. Here rank 0 alone is asked for its verbs, at powers of four
# elements, as if no other rank kept it waiting, and sizes between two of these cost in proportion.


@lru_cache(maxsize=4096)
def estimate(
    exchange: Exchange, numel: int, dtype: torch.dtype, tariff: Tariff
) -> tuple[Superstep, ...]:
    """Three supersteps of a message of one element or more: before the wire, on it, behind it."""
    low = 1
    while low * 4 <= numel:
        low *= 4
    share = (numel - low) / (3 * low)
    figures = below = _figures_at(exchange, low, dtype, tariff)
    if share:
        high = 4 * low if low < 4**15 or numel >= 2**31 else 2**31 - 2**16
        share = (numel - low) / (high - low)
        above = _figures_at(exchange, high, dtype, tariff)
        figures = [one + share * (other - one) for one, other in zip(below, above, strict=True)]
    before_s, beside_s, latency_s, work_s, after_s, sent_bytes, num_verbs = figures
    joint = Joint("estimate", (), 0, Price(latency_s, work_s))
    return (
        Superstep((Work("encode", before_s),), (), 0),
        Superstep((Work("beside", beside_s),), (joint,), sent_bytes, num_verbs),
        Superstep((Work("decode", after_s),), (), 0),
    )


@lru_cache(maxsize=4096)
def _figures_at(exchange: Exchange, numel: int, dtype: torch.dtype, tariff: Tariff) -> list[float]:
    """Seconds of computations before the first transfer and beside transfers, of latency, of a
    whole link and of computations behind the first transfer; bytes sent; verbs for the network."""
    # A matrix for each rank of a host, as tensors that stay whole are shared out among these.
    shapes = squarest(numel, tariff.ranks_per_host) if exchange.declared.whole_tensors else ()
    spec = TensorSpec("", numel, dtype, shapes)
    before_s = beside_s = latency_s = work_s = after_s = sent_bytes = num_verbs = 0.0
    for one in supersteps_of_rank(exchange, spec, tariff) if tariff.num_ranks > 1 else ():
        seconds = sum(work.seconds for work in one.works)
        if one.wire:
            latency, work = alone_on(one.wire, tariff.ranks_per_host)
            latency_s, work_s = latency_s + latency, work_s + work
            sent_bytes, num_verbs = sent_bytes + one.sent_bytes, num_verbs + 1
            beside_s += seconds
        elif num_verbs:
            after_s += seconds
        else:
            before_s += seconds
    return [before_s, beside_s, latency_s, work_s, after_s, sent_bytes, num_verbs]


# ---- the representative rank -------------------------------------------------------------------


@lru_cache(maxsize=4096)
def alone(exchange: Exchange, spec: TensorSpec, tariff: Tariff) -> tuple[Superstep, ...]:
    """The slowest rank's supersteps in the exchange of one gradient on an idle network."""
    if tariff.num_ranks == 1:
        return ()
    alike = supersteps_of_alike(exchange, spec, tariff)
    if alike is not None:
        return _folded(alike, [sum(alone_on(one.wire)) for one in alike if one.wire])
    every = supersteps_by_stretches(exchange, spec, tariff)
    per_host = tariff.ranks_per_host
    outcome = play(
        Traffic([[own] for own in every], [[0.0]] * len(every), [""], ranks_per_host=per_host)
    )
    slowest = max(range(len(every)), key=lambda rank: outcome.end_s[rank][0])
    seconds = [
        span.duration_s
        for span in outcome.spans
        if span.rank == slowest and span.lane == "communication"
    ]
    return _folded(every[slowest], seconds, per_host)


def _folded(
    supersteps: tuple[Superstep, ...], wire_s: list[float], ranks_per_host: int = 1
) -> tuple[Superstep, ...]:
    """The supersteps with one collective in place of the verbs for the network of each.

    ``wire_s`` holds the seconds that the verbs of each such superstep took. Two of these become one
    where nothing that takes time is computed between them.
    """
    on_wire = [number for number, superstep in enumerate(supersteps) if superstep.wire]
    between = range(on_wire[0], on_wire[-1]) if on_wire else range(0)
    took_s = iter(wire_s)
    found: list[Superstep] = []
    for number, superstep in enumerate(supersteps):
        if superstep.wire:
            superstep = superstep._replace(wire=(_joint(superstep, next(took_s), ranks_per_host),))
        is_idle = not any(work.seconds for work in superstep.works)
        if is_idle and not superstep.wire and number in between:
            continue
        if is_idle and superstep.wire and found and found[-1].wire:
            superstep = _merged(found.pop(), superstep)
        found.append(superstep)
    return tuple(found)


def _joint(superstep: Superstep, took_s: float, ranks_per_host: int) -> Joint:
    """A superstep's verbs for the network as one collective.

    Its links are in use as long as the busier of the two directions is.
    """
    work_s = min(took_s, alone_on(superstep.wire, ranks_per_host).work_s)
    return Joint(superstep.name, (), int(superstep.sent_bytes), Price(took_s - work_s, work_s))


def _merged(before: Superstep, after: Superstep) -> Superstep:
    (one,), (other,) = before.wire, after.wire
    names = dict.fromkeys(f"{before.name}+{after.name}".split("+"))
    price = Price(*map(sum, zip(one.price, other.price, strict=True)))
    size_bytes = one.size_bytes + other.size_bytes
    joint = Joint("+".join(names), (), size_bytes, price)
    num_verbs = before.num_verbs + after.num_verbs
    return Superstep((*before.works, *after.works), (joint,), size_bytes, num_verbs)
