"""secopa: each gradient is compressed, and cut into as many partitions, as a cost model advises.

Source: Wu et al., "HiPress" (IEEE TPDS 2023), section 3.3, selective compression and partitioning
    (SeCoPa), with equations 1 and 2 and tables 2 and 3; section 6.1 for aggregators that sit with
    the workers. The equations are in ``planning/casync.py``.
Differences from the paper:
    - ``casync_ps`` and ``casync_ring`` always cut a message into N chunks, of which one lies on
      each rank. So K decides whether to compress, and how many batches of N a gradient is cut into:
      ceil(K / N) messages. That it has fewer than N partitions within a batch is not carried out.
    - What stays uncompressed goes by an all-reduce, which is CaSync-Ring with K = N.
    - Section 3.2's bulk communication has a coordinator that batches small gradients by size and
      time-out. Here uncompressed gradients of one dtype share a message, in backward order, until
      it holds ``bulk_bytes``. Compressed ones go by themselves.
    - Curves are the cluster's measured lines; the paper fits them in the first iteration.
    - Encodes and decodes of PowerSGD are two and one, and its two all-reduces follow each other;
      table 3 has one of each.
    - At most 16 batches are tried; the paper states no bound.
Settings: compressor, and its density if it is a sparsifier; collective, "casync_ps", "casync_ring",
    or "allreduce" for a compressor of low rank; bulk_bytes; credit, the messages at once.
Order: backward; the next forward starts when all communication has ended.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ..bounds import check_share
from ..contract import Compressor, Exchange, Layout
from ..data.cluster import Cluster
from ..data.plan import DENSE, Chunk, ExchangeSetting, Plan, PlannedMessage, Setting
from ..data.profile import Profile, ProfiledTensor
from ..errors import invalid
from ..exchange import algorithm_by_name, by_name
from ..planning.buckets import check_bytes, check_credit
from ..planning.casync import CaSyncCost, LeastCost
from ..planning.fusion import arrivals
from ..spec import TensorSpec
from ..travel import travel

COLLECTIVES = ("casync_ps", "casync_ring", "allreduce")


def secopa(
    profile: Profile,
    cluster: Cluster,
    *,
    compressor: str = "onebit",
    density: float | None = None,
    collective: str = "casync_ps",
    bulk_bytes: int = 4 * 2**20,
    credit: int = 4,
) -> Plan:
    """The plan of HiPress's selective compression and partitioning for this profile and cluster.

    Raises ``InvalidSetting`` for a compressor that the cluster has not measured.
    """
    check_bytes("bulk_bytes", bulk_bytes)
    check_credit(credit)
    if density is not None:
        check_share("density", density)
    exchange = _exchange(compressor, density, collective)
    messages: list[PlannedMessage] = []
    filling: dict[str, list[ProfiledTensor]] = {}
    choose = partial(_choose, cluster, exchange)
    for tensor, _ in arrivals(profile):
        choice = choose(tensor) if cluster.num_ranks > 1 else None
        if choice is not None and choice.is_compressed:
            num_batches = -(-choice.num_partitions // cluster.num_ranks)
            messages += _cut(tensor, num_batches, compressor)
            continue
        held = filling.setdefault(tensor.dtype, [])
        held.append(tensor)
        if sum(one.size_bytes for one in held) >= bulk_bytes:
            messages.append(_together(filling.pop(tensor.dtype)))
    messages += [_together(held) for held in filling.values()]
    used = {message.exchange for message in messages} - {DENSE}
    settings: dict[str, Setting] = {"compressor": compressor, "collective": collective}
    if density is not None:
        settings["density"] = density
    return Plan(
        planner="secopa",
        model=profile.model,
        settings={**settings, "bulk_bytes": bulk_bytes, "credit": credit},
        messages=tuple(messages),
        credit=credit,
        exchanges={compressor: exchange} if used else {},
    )


def _exchange(compressor: str, density: float | None, collective: str) -> ExchangeSetting:
    """The exchange of what is compressed; refuses what the cost model has no constants for."""
    if collective not in COLLECTIVES:
        known = ", ".join(map(repr, COLLECTIVES))
        raise invalid("collective", collective, known, "write 'casync_ps'")
    settings: dict[str, Setting] = {} if density is None else {"density": density}
    made: Any = algorithm_by_name(compressor, settings)
    is_pair = isinstance(made, Compressor)
    if not is_pair and made.traits.layout is not Layout.LOW_RANK:
        accepted = "a compressor that a collective takes, or one of low rank"
        raise invalid("compressor", compressor, accepted, "see gradwire list compressor")
    if is_pair == (collective == "allreduce"):
        accepted = "'casync_ps' or 'casync_ring'" if is_pair else "'allreduce'"
        raise invalid(f"collective of {compressor}", collective, accepted, "write one of these")
    exchange = ExchangeSetting(
        compressor=compressor,
        settings=settings,
        collective=collective if is_pair else None,
        error_feedback=made.traits.error_feedback,
    )
    _made(exchange)  # refuses what cannot be paired
    return exchange


def _made(exchange: ExchangeSetting) -> Exchange:
    named = exchange.compressor, exchange.settings, exchange.collective
    return by_name(*named, error_feedback=exchange.error_feedback)


def _choose(cluster: Cluster, exchange: ExchangeSetting, tensor: ProfiledTensor) -> LeastCost:
    name = exchange.compressor
    if name not in cluster.codecs:
        measured = ", ".join(sorted(cluster.codecs)) or "none"
        raise invalid(
            "compressor",
            name,
            f"one whose encode and decode the cluster's file holds ({measured})",
            "measure it with gradwire profile, without --no-codecs, and give its cluster.json",
        )
    cost = CaSyncCost.of(
        cluster,
        cluster.codecs[name],
        is_ring=exchange.collective == "casync_ring",
        is_low_rank=exchange.collective is None,
    )
    return cost.choose(tensor.numel, tensor.size_bytes, _payload_bytes(exchange, tensor, cluster))


def _payload_bytes(exchange: ExchangeSetting, tensor: ProfiledTensor, cluster: Cluster) -> float:
    """Bytes that a whole gradient becomes: r m."""
    dtype = getattr(torch, tensor.dtype)
    made: Any = algorithm_by_name(exchange.compressor, exchange.settings)
    if isinstance(made, Compressor):
        return made.typical(TensorSpec("", tensor.numel, dtype)).size_bytes
    spec = TensorSpec("", tensor.numel, dtype, (tensor.shape,))
    sent_bytes: float = made.expected_bytes(spec, cluster.num_ranks)[0]
    return sent_bytes / travel("all_reduce", cluster.num_ranks).copies


def _cut(tensor: ProfiledTensor, num_batches: int, exchange: str) -> list[PlannedMessage]:
    """A message for each batch; their elements differ by one at most, and none is empty."""
    count = min(num_batches, tensor.numel)
    borders = [tensor.numel * place // count for place in range(count + 1)]
    return [
        PlannedMessage(
            chunks=(Chunk(tensor=tensor.name, start=start, stop=stop),), exchange=exchange
        )
        for start, stop in pairwise(borders)
    ]


def _together(tensors: list[ProfiledTensor]) -> PlannedMessage:
    chunks = (Chunk(tensor=one.name, start=0, stop=one.numel) for one in tensors)
    return PlannedMessage(chunks=tuple(chunks))


EXAMPLES = (
    secopa,
    partial(secopa, collective="casync_ring", bulk_bytes=1000, credit=1),
    partial(secopa, compressor="dgc", density=0.1),
    partial(secopa, compressor="powersgd", collective="allreduce"),
)
