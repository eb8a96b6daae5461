"""simulate: one iteration of a plan as a trace; simulate_exchange: one exchange by itself."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
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
from .clock import Demand, Encode, Timing
from .events import Traffic, play
from .supersteps import Tariff, supersteps_of


def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    ranks: Literal["one", "all"] = "one",
    jitter: float = 0.0,
    seed: int = 0,
) -> Trace:
    """The trace of one iteration, from the start of its backward pass to the end of the forward.

    With ``ranks="one"`` one rank stands for all of them: dense messages take the time of a closed
    form, others that of the exchange when it is alone. With ``ranks="all"`` every rank is played by
    events, on links that all transfers share. With ``jitter`` every rank computes faster or slower
    than the profile, by a factor drawn for it with ``seed`` (log-normal, of mean 1 and about that
    standard deviation).

    The lanes "backward" and "forward" have a span for each layer, the former also for what a plan
    has encoded within the backward pass, "communication" and "compute"
    spans of the messages' work; ``size_bytes`` counts the bytes that the rank sends in a span.
    Encode, decode and merge take the seconds in the cluster's ``codecs``. Where a compressor was
    not measured they take 0, as other computations of a text always do, and the span's name says
    so. Gather and scatter have no spans and take 0 too. ``Trace.iteration_s`` is US-Byte's t_iter
    (equation 12).

    Raises ``InvalidSetting`` for a plan that is not sound for the profile, for an exchange that
    cannot be simulated, and for jitter of one rank only.
    """
    if ranks not in ("one", "all"):
        raise invalid("ranks", ranks, "'one' or 'all'", "'one' is the faster")
    if not 0 <= jitter < math.inf:
        raise invalid("jitter", jitter, "a number, 0 or more", "0.05 is 5 %")
    if jitter and ranks == "one":
        raise InvalidSetting(
            f"jitter {jitter} makes ranks differ, and ranks='one' has one that stands for all; "
            "use ranks='all'"
        )
    demand = Demand.of(plan, profile, cluster)
    if ranks == "one" or cluster.num_ranks == 1:
        return Trace.of(_spans(demand.one_rank(), profile.layers, 0, 1.0))
    draw = random.Random(seed)
    slowness = [_factor(draw, jitter) for _ in range(cluster.num_ranks)]
    every = zip(demand.all_ranks(slowness), slowness, strict=True)
    return Trace.of(
        span
        for rank, (timing, factor) in enumerate(every)
        for span in _spans(timing, profile.layers, rank, factor)
    )


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


def _factor(draw: random.Random, jitter: float) -> float:
    return math.exp(jitter * draw.gauss(0.0, 1.0) - jitter**2 / 2) if jitter else 1.0


def _spans(timing: Timing, layers: tuple[Layer, ...], rank: int, slowness: float) -> Iterator[Span]:
    """The spans of one rank; behind the backward of each layer comes what is encoded there."""
    yield from timing.spans
    encoded: dict[int, list[Encode]] = {}
    for one in timing.inline:
        encoded.setdefault(one.layer, []).append(one)
    for number, layer in enumerate(layers):
        start_s, end_s = timing.backward_start_s[number], timing.backward_end_s[number]
        own = encoded.get(number, [])
        end_s = start_s + slowness * layer.backward_s if own else end_s
        yield Span(rank, "backward", layer.name, start_s, end_s, step=0)
        for one in own:
            start_s, end_s = end_s, end_s + slowness * one.seconds
            yield Span(rank, "backward", one.name, start_s, end_s, step=0, message=one.message)
        start_s, end_s = timing.forward_start_s[number], timing.forward_end_s[number]
        yield Span(rank, "forward", layer.name, start_s, end_s, step=0)
