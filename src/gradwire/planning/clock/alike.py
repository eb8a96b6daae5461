"""Alike: many ranks that all do the same, of which one can be priced without the others.

No rank then keeps another one waiting. Each sends to the rank so far ahead, and takes as much at
the same time from the one so far behind. So the link of each serves one rank's verbs alone, and
what takes seconds to play on 64 ranks takes milliseconds.
"""

from __future__ import annotations

from ...contract import Exchange
from ...contract.spec import TensorSpec
from .supersteps import MOST_PLAYED, Hop, Joint, Price, Superstep, Tariff, supersteps_of_rank


def supersteps_of_alike(
    exchange: Exchange, spec: TensorSpec, tariff: Tariff
) -> tuple[Superstep, ...] | None:
    """The supersteps of rank 0 if many ranks all do the same, as seen from their own place.

    None where they are few or do not. Of all ranks four are looked at, as a text among many takes
    long by itself.
    """
    world = tariff.num_ranks
    if not MANY <= world <= MOST_PLAYED or tariff.ranks_per_host > 1:
        return None
    first = supersteps_of_rank(exchange, spec, tariff)
    seen = _from_own_place(first, 0, world)
    for rank in (1, world // 2, world - 1):
        own = supersteps_of_rank(exchange, spec, tariff, rank)
        if _from_own_place(own, rank, world) != seen:
            return None
    return first if all(_is_shift(one.wire, world) for one in first) else None


MANY = 16
"""From so many ranks on it is worth while to find out whether all do the same."""


def _from_own_place(
    supersteps: tuple[Superstep, ...], rank: int, world: int
) -> tuple[Superstep, ...]:
    return tuple(
        one._replace(
            wire=tuple(
                verb._replace(peer=(verb.peer - rank) % world) if isinstance(verb, Hop) else verb
                for verb in one.wire
            )
        )
        for one in supersteps
    )


def _is_shift(wire: tuple[Hop | Joint, ...], world: int) -> bool:
    """Whether every send of rank 0 is met by the same rank's other neighbour, beside no others."""
    hops = [verb for verb in wire if isinstance(verb, Hop)]
    sent = sorted((hop.peer, hop.size_bytes) for hop in hops if hop.sends)
    taken = sorted((-hop.peer % world, hop.size_bytes) for hop in hops if not hop.sends)
    return sent == taken and (not hops or len(hops) == len(wire))


def alone_on(wire: tuple[Hop | Joint, ...]) -> Price:
    """Seconds of latency, and of a link that serves nothing else, for verbs that run at once.

    Its two directions are busy at the same time; a collective keeps both busy.
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
    return Price(latency_s, together_s + max(sends_s, receives_s))
