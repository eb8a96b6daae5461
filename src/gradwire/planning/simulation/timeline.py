"""simulate: one iteration of a plan as a trace; simulate_exchange: one exchange by itself."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch

from ...contract import Exchange
from ...contract.spec import TensorSpec
from ...contract.trace.span import Span, Trace
from ...errors import InvalidSetting, invalid
from ...exchange.two_level import on_hosts
from ..data.cluster import Cluster
from ..data.plan import Plan
from ..data.profile import Layer, Profile
from .clock import Timing, forward_times, run_on_clock
from .demand import Demand, Encoding, Inline, exchanges_on, without_encodes
from .events import Traffic, play
from .pace import Pace
from .supersteps import Superstep, Tariff, supersteps_of, takes_turns


def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    ranks: Literal["one", "all"] = "one",
    jitter: float = 0.0,
    seed: int = 0,
) -> Trace:
    """Predicts one iteration of a plan, from the start of backward to the end of the next forward.

    Args:
        plan: The plan.
        profile: The model's layers.
        cluster: Ranks, links and measured costs.
        ranks: "one" lets one rank stand for all, in closed form. "all" simulates every rank, on
            links that all transfers share.
        jitter: The standard deviation of a factor by which each rank computes slower or faster
            (log-normal, mean 1). It needs ``ranks="all"``.
        seed: The seed of these factors.

    Returns:
        A trace with the lanes "backward", "forward", "communication" and "compute".
        ``Trace.iteration_s`` is US-Byte's t_iter (equation 12), and ``size_bytes`` of a span counts
        the bytes that the rank sends in it. Compressors that the cluster has not measured take 0 s,
        and their spans say so. Gather and scatter take 0 s too.

    Raises:
        InvalidSetting: The plan does not fit the profile, an exchange cannot be simulated, or
            ``jitter`` was given for one rank.

    >>> import gradwire as gw
    >>> profile = gw.catalogue.load("vgg16")
    >>> cluster = gw.Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> simulate(gw.plan("ddp", profile, cluster), profile, cluster).iteration_s > 0
    True
    """
    if ranks not in ("one", "all"):
        raise invalid("ranks", ranks, "'one' or 'all'", "'one' is the faster")
    if not 0 <= jitter < math.inf:
        raise invalid("jitter", jitter, "a number, 0 or more", "0.05 is 5 %")
    if jitter and ranks == "one":
        raise InvalidSetting(
            f"jitter {jitter} needs every rank, and ranks='one' simulates one for all; "
            "use ranks='all'"
        )
    if ranks == "one" or cluster.num_ranks == 1:
        timing = run_on_clock(plan, profile, cluster)
        demand = Demand.of(plan, profile)
        return Trace.of(_spans_of_one(timing, demand, cluster))
    return Trace.of(_spans_of_all(Demand.of(plan, profile), cluster, jitter, seed))


def simulate_exchange(
    exchange: Exchange,
    numel: int,
    cluster: Cluster,
    dtype: torch.dtype = torch.float32,
    *,
    shapes: tuple[tuple[int, ...], ...] = (),
) -> Trace:
    """The trace of one exchange of ``numel`` elements on all ranks, with nothing else under way.

    ``shapes`` are those of the tensors in the gradient, for exchanges that act on matrices; without
    them the gradient is a vector. The trace is the first step's, in which rank 0 leads where ranks
    take turns. The exchange's own text is run, without data. A rank that is alone sends nothing,
    and its trace is empty. On a cluster whose hosts have several ranks these add up first, as under
    ``attach(mesh=)``. Raises ``InvalidSetting`` if the exchange looks at values, or if ranks
    disagree on a verb, and ``Deadlock`` if they wait for each other.
    """
    if cluster.num_ranks == 1:
        return Trace()
    spec = TensorSpec("", numel, dtype, shapes)
    exchange = on_hosts(exchange, cluster.ranks_per_host)
    every = supersteps_of(exchange, spec, Tariff.of(exchange, cluster))
    per_host = cluster.ranks_per_host
    traffic = Traffic([[own] for own in every], [[0.0]] * len(every), [""], ranks_per_host=per_host)
    return Trace.of(play(traffic).spans)


def _spans_of_one(timing: Timing, demand: Demand, cluster: Cluster) -> Iterator[Span]:
    layers = demand.profile.layers
    forward = zip(timing.forward_start_s, timing.forward_end_s, strict=True)
    yield from _of_backward(
        0, layers, timing.backward_start_s, timing.backward_end_s, timing.inline
    )
    yield from _of_layers(0, "forward", layers, forward)
    yield from timing.spans
    if timing.spans:
        return
    for number, label in enumerate(demand.labels()):
        yield Span(
            0,
            "communication",
            label,
            timing.message_start_s[number],
            timing.message_end_s[number],
            size_bytes=cluster.wire_bytes(timing.message_bytes[number]),
            step=0,
            message=number,
        )


def _spans_of_all(demand: Demand, cluster: Cluster, jitter: float, seed: int) -> Iterator[Span]:
    layers = demand.profile.layers
    draw = random.Random(seed)
    slowness = [_factor(draw, jitter) for _ in range(cluster.num_ranks)]
    encoding = Encoding.of(demand, cluster)
    alone_s = encoding.backward_ends([layer.backward_s for layer in layers])
    ends_s = [[factor * end_s for end_s in alone_s] for factor in slowness]
    played = play(
        Traffic(
            _supersteps_of_all(demand, cluster),
            [demand.ready_s(own_s) for own_s in ends_s],
            demand.labels(),
            demand.plan.credit,
            demand.after(),
            [encoding.early_from(own_s) for own_s in ends_s],
            slowness,
            cluster.ranks_per_host,
            cluster.beside,
        )
    )
    yield from played.spans
    for rank, factor in enumerate(slowness):
        pace = Pace.of(played.spans, cluster.beside, rank)
        own_s = [pace.end_s(0.0, end_s) for end_s in ends_s[rank]]
        yield from _of_backward(rank, layers, [*own_s[1:], 0.0], own_s, encoding.inline, factor)
        may_start_s = demand.forward_may_start_s(own_s, played.end_s[rank])
        forward_s = [factor * layer.forward_s for layer in layers]
        forward = zip(*forward_times(forward_s, may_start_s, pace), strict=True)
        yield from _of_layers(rank, "forward", layers, forward)


def _factor(draw: random.Random, jitter: float) -> float:
    return math.exp(jitter * draw.gauss(0.0, 1.0) - jitter**2 / 2) if jitter else 1.0


def _supersteps_of_all(demand: Demand, cluster: Cluster) -> list[list[tuple[Superstep, ...]]]:
    """The supersteps of each message on each rank.

    Messages of one size and exchange are alike, but for the turn of ranks.
    """
    exchanges = exchanges_on(demand.plan, cluster)
    tariffs = {name: Tariff.of(made, cluster) for name, made in exchanges.items()}
    parcels = demand.parcels()
    turning = {
        (name, spec)
        for name, spec in dict.fromkeys(parcels)
        if takes_turns(exchanges[name], spec, tariffs[name])
    }
    turns = [
        turn if one in turning else 0 for one, turn in zip(parcels, demand.turns(), strict=True)
    ]
    found = {
        (name, spec, turn): supersteps_of(exchanges[name], spec, tariffs[name], turn)
        for (name, spec), turn in dict.fromkeys(zip(parcels, turns, strict=True))
    }
    every = [
        [found[*parcel, turn][rank] for parcel, turn in zip(parcels, turns, strict=True)]
        for rank in range(cluster.num_ranks)
    ]
    return [without_encodes(own, demand) for own in every]


def _of_backward(
    rank: int,
    layers: tuple[Layer, ...],
    starts_s: Sequence[float],
    ends_s: Sequence[float],
    inline: Sequence[Inline],
    slowness: float = 1.0,
) -> Iterator[Span]:
    """The backward of each layer, and behind it what is encoded there."""
    encoded: dict[int, list[Inline]] = {}
    for one in inline:
        encoded.setdefault(one.layer, []).append(one)
    for number, layer in enumerate(layers):
        own = encoded.get(number, [])
        end_s = starts_s[number] + slowness * layer.backward_s if own else ends_s[number]
        yield Span(rank, "backward", layer.name, starts_s[number], end_s, step=0)
        for one in own:
            start_s, end_s = end_s, end_s + slowness * one.seconds
            yield Span(rank, "backward", one.name, start_s, end_s, step=0, message=one.message)


def _of_layers(
    rank: int, lane: str, layers: tuple[Layer, ...], times: Iterable[tuple[float, float]]
) -> Iterator[Span]:
    for layer, (start_s, end_s) in zip(layers, times, strict=True):
        yield Span(rank, lane, layer.name, start_s, end_s, step=0)
