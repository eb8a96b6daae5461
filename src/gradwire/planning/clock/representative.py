"""The representative rank: all ranks of a plan's iteration for the price of one.

An exchange is played once on all ranks, with nothing else on the network; where many ranks all do
the same, one of them with the others always there. The slowest rank's supersteps then stand for
every rank, but a stretch of verbs for the network becomes one collective that takes as long as the
stretch took alone. The seconds in which its links were in use are shared with other messages; the
rest is latency.
"""

from __future__ import annotations

from functools import lru_cache

from ...contract import Exchange
from ...contract.spec import TensorSpec
from ..data.cluster import Cluster
from .alike import alone_on, supersteps_of_alike
from .demand import Demand, exchanges_on
from .encoding import without_encodes
from .engine import Traffic, play
from .supersteps import Joint, Price, Superstep, Tariff, supersteps_of_those_unlike


def supersteps_of_one(demand: Demand, cluster: Cluster) -> list[tuple[Superstep, ...]]:
    """The representative rank's supersteps, one entry for each message."""
    exchanges = exchanges_on(demand.plan, cluster)
    tariffs = {name: Tariff.of(made, cluster) for name, made in exchanges.items()}
    every = [alone(exchanges[name], spec, tariffs[name]) for name, spec in demand.parcels()]
    return without_encodes(every, demand)


@lru_cache(maxsize=4096)
def alone(exchange: Exchange, spec: TensorSpec, tariff: Tariff) -> tuple[Superstep, ...]:
    """The slowest rank's supersteps in the exchange of one gradient on an idle network."""
    if tariff.num_ranks == 1:
        return ()
    alike = supersteps_of_alike(exchange, spec, tariff)
    if alike is not None:
        return _folded(alike, [sum(alone_on(one.wire)) for one in alike if one.wire])
    every = supersteps_of_those_unlike(exchange, spec, tariff)
    per_host = tariff.ranks_per_host if len(every) > 1 else 1
    outcome = play(
        Traffic([[own] for own in every], [[0.0]] * len(every), [""], ranks_per_host=per_host)
    )
    slowest = max(range(len(every)), key=lambda rank: outcome.end_s[rank][0])
    seconds = [
        span.duration_s
        for span in outcome.spans
        if span.rank == slowest and span.lane == "communication"
    ]
    return _folded(every[slowest], seconds)


def _folded(supersteps: tuple[Superstep, ...], wire_s: list[float]) -> tuple[Superstep, ...]:
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
            superstep = superstep._replace(wire=(_joint(superstep, next(took_s)),))
        is_idle = not any(work.seconds for work in superstep.works)
        if is_idle and not superstep.wire and number in between:
            continue
        if is_idle and superstep.wire and found and found[-1].wire:
            superstep = _merged(found.pop(), superstep)
        found.append(superstep)
    return tuple(found)


def _joint(superstep: Superstep, took_s: float) -> Joint:
    """A superstep's verbs for the network as one collective.

    Its links are in use as long as the busier of the two directions is.
    """
    work_s = min(took_s, alone_on(superstep.wire).work_s)
    return Joint(superstep.name, (), superstep.sent_bytes, Price(took_s - work_s, work_s))


def _merged(before: Superstep, after: Superstep) -> Superstep:
    (one,), (other,) = before.wire, after.wire
    names = dict.fromkeys(f"{before.name}+{after.name}".split("+"))
    price = Price(*map(sum, zip(one.price, other.price, strict=True)))
    size_bytes = before.sent_bytes + after.sent_bytes
    joint = Joint("+".join(names), (), size_bytes, price)
    return Superstep((*before.works, *after.works), (joint,), size_bytes)
