"""simulate_exchange: the trace of one exchange by itself."""

from __future__ import annotations

import torch

from gradwire.contract import Exchange
from gradwire.contract.spec import TensorSpec
from gradwire.contract.trace.span import Trace
from gradwire.exchange.two_level import on_hosts
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.simulation.events import Traffic, play
from gradwire.planning.simulation.supersteps import Tariff, supersteps_of


def simulate_exchange(
    exchange: Exchange,
    numel: int,
    cluster: Cluster,
    dtype: torch.dtype = torch.float32,
    *,
    shapes: tuple[tuple[int, ...], ...] = (),
) -> Trace:
    """The trace of one exchange of ``numel`` elements on all ranks, by itself.

    ``shapes`` are the shapes of the gradient's tensors, for exchanges that act on
    matrices; without them the gradient is a vector. The trace is the first step's, in
    which rank 0 leads where ranks take turns. The exchange's own steps are run, without
    data. A rank that is alone sends nothing, and its trace is empty. On a cluster whose
    hosts have several ranks these add up first, as under ``attach(mesh=)``. Raises
    ``InvalidSetting`` if the exchange looks at values, or if ranks disagree on a verb,
    and ``Deadlock`` if they wait for each other.
    """
    if cluster.num_ranks == 1:
        return Trace()
    spec = TensorSpec("", numel, dtype, shapes)
    exchange = on_hosts(exchange, cluster.ranks_per_host)
    tariff = Tariff.of(exchange, cluster)
    every = supersteps_of(exchange, spec, tariff)
    traffic = Traffic(
        [[own] for own in every],
        [[0.0]] * len(every),
        [""],
        ranks_per_host=cluster.ranks_per_host,
        speeds=tariff.speeds,
    )
    return Trace.of(play(traffic).spans)
