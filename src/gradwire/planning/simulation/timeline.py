"""simulate: one iteration of a plan as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ...contract.registry import extension
from ...contract.trace.span import Span, Trace
from ...errors import invalid
from ..data.cluster import Cluster
from ..data.plan import Plan
from ..data.profile import Layer, Profile
from .clock import Demand, Encode, Timing


def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    ranks: Literal["one", "all"] = "one",
) -> Trace:
    """Predicts one iteration, from the start of backward to the next forward's end.

    Args:
        plan: The plan.
        profile: The model's layers.
        cluster: Ranks, links and measured costs.
        ranks: "one" (the default) lets one rank stand for all, in closed form. "all"
            simulates every rank, on links that all transfers share, by gradwire-lab.

    Returns:
        A trace with the lanes "backward", "forward", "communication" and "compute".
        ``Trace.iteration_s`` is US-Byte's t_iter (equation 12), and ``size_bytes`` of a
        span counts the bytes that the rank sends in it. Compressors that the cluster
        has not measured take 0 s, and their spans say so. Gather and scatter take 0 s
        too.

    Raises:
        InvalidSetting: The plan does not fit the profile, or an exchange cannot be
            simulated.

    >>> import gradwire as gw
    >>> profile = gw.catalogue.load("vgg16")
    >>> cluster = gw.Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> simulate(gw.plan("ddp", profile, cluster), profile, cluster).iteration_s > 0
    True
    """
    if ranks not in ("one", "all"):
        raise invalid("ranks", ranks, "'one' or 'all'", "'one' is the faster")
    if plan.bulk is not None:
        raise invalid(
            "plan.bulk",
            plan.bulk,
            "None, as no coordinator is simulated here",
            "papers/hipress/slots.py in the sources simulates it",
        )
    demand = Demand.of(plan, profile, cluster)
    is_one = ranks == "one" or cluster.num_ranks == 1
    every = [demand.one_rank()]
    if not is_one:
        every = extension("all_ranks", "gw.simulate(ranks='all')")(demand)
    return Trace.of(
        span
        for rank, timing in enumerate(every)
        for span in _spans(timing, profile.layers, rank)
    )


def _spans(timing: Timing, layers: tuple[Layer, ...], rank: int) -> Iterator[Span]:
    """The spans of one rank.

    Behind the backward of each layer comes what is encoded there.
    """
    yield from timing.spans
    encoded: dict[int, list[Encode]] = {}
    for work in timing.inline:
        encoded.setdefault(work.layer, []).append(work)
    for number, layer in enumerate(layers):
        start_s = timing.backward_start_s[number]
        end_s = timing.backward_end_s[number]
        works = encoded.get(number, [])
        end_s = start_s + layer.backward_s if works else end_s
        yield Span(rank, "backward", layer.name, start_s, end_s, step=0)
        for work in works:
            start_s = end_s
            end_s = end_s + work.seconds
            yield Span(
                rank,
                "backward",
                work.name,
                start_s,
                end_s,
                step=0,
                message=work.message,
            )
        start_s = timing.forward_start_s[number]
        end_s = timing.forward_end_s[number]
        yield Span(rank, "forward", layer.name, start_s, end_s, step=0)
