"""The representative rank: all ranks of a plan's iteration for the price of one.

Ranks that do alike do not keep each other waiting: where each sends to some, it takes
as much from others at the same time. So a few ranks are asked for their verbs, and the
one that takes longest stands for all. Few aggregators have more to do than other ranks.
Such an exchange is played on all ranks, with nothing else on the network. The same is
done if hosts differ in distances or rates, and ranks send to single ranks.

A stretch of verbs for the network becomes one collective that takes as long as the
stretch took alone. The seconds in which its links were in use are shared with other
messages; the rest is latency.

Ranks of a host that exchange whole tensors wait for the one with the largest, in each
message for another. With four messages at once, PowerSGD's VGG16 on hosts of two ranks
takes a tenth longer than is said here.
"""

from functools import lru_cache

import torch

from ...contract import Exchange
from ...contract.spec import TensorSpec, squarest
from ...contract.verbs import Among
from ...exchange.without_data import record
from .events import Traffic, play
from .supersteps import (
    MOST_PLAYED,
    Hop,
    Joint,
    Price,
    Superstep,
    Tariff,
    Work,
    check_played,
    supersteps_of,
    supersteps_of_rank,
)


def alone_on(wire: tuple[Hop | Joint, ...], ranks_per_host: int = 1) -> Price:
    """Seconds of latency, and of a link of its own, for verbs that run at once.

    Its two directions are busy at the same time; a collective keeps both busy. All
    ranks of a host exchange shares with other hosts at once. What they send each other
    is latency to their link.
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
    among = wire[0].among
    if among is Among.HOST:
        return Price(latency_s + work_s, 0.0)
    if among is Among.HOSTS:
        work_s *= ranks_per_host
    return Price(latency_s, work_s)


# ---- Curves --------------------------------------------------------------------------
#
# Costs of an exchange's messages, between sizes that one rank was recorded at.
#
# They serve planners that compare hundreds of plans of a kind. The simulator asks
# several ranks for each size, or plays all, which among many takes seconds. Here rank 0
# alone is asked for its verbs, at powers of four elements, as if no other rank kept it
# waiting, and sizes between two of these cost in proportion.


@lru_cache(maxsize=4096)
def estimate(
    exchange: Exchange, numel: int, dtype: torch.dtype, tariff: Tariff
) -> tuple[Superstep, ...]:
    """Three supersteps of a message with elements: before, on and behind the wire."""
    low = 1
    while low * 4 <= numel:
        low *= 4
    figures = below = _figures_at(exchange, low, dtype, tariff)
    if numel > low:
        high = 4 * low if low < 4**15 or numel >= 2**31 else 2**31 - 2**16
        share = (numel - low) / (high - low)
        above = _figures_at(exchange, high, dtype, tariff)
        figures = [
            one + share * (other - one) for one, other in zip(below, above, strict=True)
        ]
    before_s, beside_s, latency_s, work_s, after_s, sent_bytes, num_verbs = figures
    joint = Joint("estimate", (), 0, Price(latency_s, work_s))
    return (
        Superstep((Work("encode", before_s),), (), 0),
        Superstep((Work("beside", beside_s),), (joint,), sent_bytes, num_verbs),
        Superstep((Work("decode", after_s),), (), 0),
    )


@lru_cache(maxsize=4096)
def _figures_at(
    exchange: Exchange, numel: int, dtype: torch.dtype, tariff: Tariff
) -> list[float]:
    """Seconds of computations before the first transfer and beside transfers, of
    latency, of a whole link and of computations behind the first transfer; bytes sent;
    verbs for the network.
    """
    # A matrix for each rank of a host, as tensors that stay whole are shared out among
    # these.
    shapes = (
        squarest(numel, tariff.ranks_per_host)
        if exchange.declared.whole_tensors
        else ()
    )
    spec = TensorSpec("", numel, dtype, shapes)
    before_s = beside_s = latency_s = work_s = after_s = sent_bytes = num_verbs = 0.0
    for one in (
        supersteps_of_rank(exchange, spec, tariff) if tariff.num_ranks > 1 else ()
    ):
        seconds = sum(work.seconds for work in one.works)
        if one.wire:
            latency, work = alone_on(one.wire, tariff.ranks_per_host)
            latency_s = latency_s + latency
            work_s = work_s + work
            sent_bytes = sent_bytes + one.sent_bytes
            num_verbs = num_verbs + 1
            beside_s += seconds
        elif num_verbs:
            after_s += seconds
        else:
            before_s += seconds
    return [before_s, beside_s, latency_s, work_s, after_s, sent_bytes, num_verbs]


# ---- the representative rank ---------------------------------------------------------

MOST_ALIKE = 8 * MOST_PLAYED
"""The most ranks that one stands for: its steps still count the payloads of all."""
MOST_ASKED = 16
"""The most ranks that are asked for their verbs, beside one host's and the last one."""
ALIKE = 1.01
"""Ranks do alike if the slowest takes at most this many times the fastest."""


@lru_cache(maxsize=4096)
def alone(
    exchange: Exchange, spec: TensorSpec, tariff: Tariff
) -> tuple[Superstep, ...]:
    """The slowest rank's supersteps for one gradient's exchange on an idle network."""
    world = tariff.num_ranks
    per_host = tariff.ranks_per_host
    if world == 1:
        return ()
    asked = {0}
    if world > MOST_ALIKE or record(exchange, spec, 0, world).is_of_its_rank:
        check_played(exchange, world)
        # Ranks of a host have other tensors; of a gradient cut into chunks the last
        # have less.
        spread = range(0, world, -(-world // MOST_ASKED))
        asked = {*range(per_host), *spread, world - 1}
    every = [supersteps_of_rank(exchange, spec, tariff, rank) for rank in sorted(asked)]
    if tariff.speeds and any(
        isinstance(verb, Hop) for superstep in every[0] for verb in superstep.wire
    ):
        return _slowest_played(supersteps_of(exchange, spec, tariff), tariff)
    took_s = [
        sum(_seconds(superstep, per_host) for superstep in supersteps)
        for supersteps in every
    ]
    kinds = {tuple(map(_kind, supersteps)) for supersteps in every}
    if len(kinds) == 1 and max(took_s) <= ALIKE * min(took_s):
        slowest = every[took_s.index(max(took_s))]
        wire_s = [
            sum(alone_on(superstep.wire, per_host))
            for superstep in slowest
            if superstep.wire
        ]
        return _folded(slowest, wire_s, per_host)
    return _slowest_played(supersteps_of(exchange, spec, tariff), tariff)


def _slowest_played(
    every: list[tuple[Superstep, ...]], tariff: Tariff
) -> tuple[Superstep, ...]:
    """The supersteps of the rank that ends last when all are played."""
    per_host = tariff.ranks_per_host
    ranks = [[supersteps] for supersteps in every]
    ready_s = [[0.0]] * len(every)
    played = play(
        Traffic(
            ranks,
            ready_s,
            [""],
            ranks_per_host=per_host,
            speeds=tariff.speeds,
        )
    )
    last = max(range(len(every)), key=lambda rank: played.end_s[rank][0])
    spans = (span for span in played.spans if span.rank == last)
    wire_s = [span.duration_s for span in spans if span.lane == "communication"]
    return _folded(every[last], wire_s, per_host)


def _seconds(superstep: Superstep, ranks_per_host: int) -> float:
    """Seconds of a superstep where nobody waits: computations pass beside transfers."""
    works_s = sum(work.seconds for work in superstep.works)
    return max(
        works_s,
        sum(alone_on(superstep.wire, ranks_per_host)) if superstep.wire else 0.0,
    )


def _kind(superstep: Superstep) -> tuple[int, ...]:
    """The numbers of its verbs, which are the same on ranks that do alike."""
    sends = sum(isinstance(verb, Hop) and verb.sends for verb in superstep.wire)
    return len(superstep.works), len(superstep.wire), sends


def _folded(
    supersteps: tuple[Superstep, ...], wire_s: list[float], ranks_per_host: int = 1
) -> tuple[Superstep, ...]:
    """The supersteps with one collective in place of the verbs for the network of each.

    ``wire_s`` holds the seconds that the verbs of each such superstep took. Two of
    these become one where nothing that takes time is computed between them.
    """
    on_wire = [number for number, superstep in enumerate(supersteps) if superstep.wire]
    between = range(on_wire[0], on_wire[-1]) if on_wire else range(0)
    took_s = iter(wire_s)
    folded: list[Superstep] = []
    for number, superstep in enumerate(supersteps):
        if superstep.wire:
            joint = _joint(superstep, next(took_s), ranks_per_host)
            superstep = superstep._replace(wire=(joint,))
        is_idle = not any(work.seconds for work in superstep.works)
        if is_idle and not superstep.wire and number in between:
            continue
        if is_idle and superstep.wire and folded and folded[-1].wire:
            superstep = _merged(folded.pop(), superstep)
        folded.append(superstep)
    return tuple(folded)


def _joint(superstep: Superstep, took_s: float, ranks_per_host: int) -> Joint:
    """A superstep's verbs for the network as one collective.

    Its links are in use as long as the busier of the two directions is.
    """
    work_s = min(took_s, alone_on(superstep.wire, ranks_per_host).work_s)
    return Joint(
        superstep.name, (), int(superstep.sent_bytes), Price(took_s - work_s, work_s)
    )


def _merged(before: Superstep, after: Superstep) -> Superstep:
    (transfer,) = before.wire
    (other,) = after.wire
    names = dict.fromkeys(f"{before.name}+{after.name}".split("+"))
    price = Price(
        latency_s=transfer.price.latency_s + other.price.latency_s,
        work_s=transfer.price.work_s + other.price.work_s,
    )
    size_bytes = transfer.size_bytes + other.size_bytes
    joint = Joint("+".join(names), (), size_bytes, price)
    num_verbs = before.num_verbs + after.num_verbs
    return Superstep((*before.works, *after.works), (joint,), size_bytes, num_verbs)
