"""secopa: each gradient is compressed, and cut into as many partitions, as a cost model advises.

Source: Wu et al., "HiPress" (IEEE TPDS 2023), section 3.3, selective compression and partitioning
    (SeCoPa), with equations 1 and 2 and tables 2 and 3; section 6.1 for aggregators that sit with
    the workers. The equations are in ``planning/casync.py``.
Differences from the paper:
    - A gradient of at most N partitions is one message, whose exchange is told their number;
      aggregators of fewer than N take turns from message to message. One of more is ceil(K / N)
      messages, all of N partitions but the last, which has the rest.
    - What stays uncompressed goes by an all-reduce, which is CaSync-Ring with K = N.
    - Section 3.2's bulk communication has a coordinator that batches small gradients of one
      destination by size or time-out. Here gradients of one dtype share a message, in backward
      order, until it holds ``bulk_bytes``. Compressed ones share messages of their own, of as
      many partitions as the cost model advises for their sum: a partition is what goes to one
      destination. They are encoded each by itself, in one call, which is section 3.2's batch
      compression. Those of more than N partitions go by themselves, as do those of a sparsifier,
      which would see one vector.
    - Curves are the cluster's measured lines; the paper fits them in the first iteration.
    - Encodes and decodes of PowerSGD are two and one, and its two all-reduces follow each other;
      table 3 has one of each.
    - At most 16 batches are tried; the paper states no bound.
Settings: compressor, and its density if it is a sparsifier; collective, "casync_ps", "casync_ring",
    or "allreduce" for a compressor of low rank; bulk_bytes; credit, the messages at once.
Order: backward; the next forward starts when all communication has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...contract import Compressor, Exchange, Layout
from ...contract.bounds import check_share
from ...contract.spec import TensorSpec
from ...contract.travel import travel
from ...errors import invalid
from ...exchange.by_name import algorithm_by_name, by_name
from ..buckets import check_bytes, check_credit
from ..casync import CaSyncCost, LeastCost
from ..data.cluster import Cluster
from ..data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage, Setting
from ..data.profile import Profile, ProfiledTensor

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
    messages = tuple(_messages(profile, cluster, exchange, bulk_bytes))
    return Plan(
        planner="secopa",
        model=profile.model,
        settings={
            "compressor": compressor,
            "collective": collective,
            "bulk_bytes": bulk_bytes,
            "credit": credit,
            **({} if density is None else {"density": density}),
        },
        messages=messages,
        credit=credit,
        exchanges=_used(messages, exchange, cluster.num_ranks),
    )


def _messages(
    profile: Profile, cluster: Cluster, exchange: ExchangeSetting, bulk_bytes: int
) -> Iterator[PlannedMessage]:
    num_ranks = cluster.num_ranks
    most_shared = num_ranks if _may_share(exchange) else 0
    held: dict[tuple[str, bool], list[ProfiledTensor]] = {}
    """Gradients that wait for others of their dtype, of which all or none are compressed."""
    every = (t for layer in reversed(profile.layers) for t in reversed(layer.tensors) if t.numel)
    for tensor in every:
        choice = _choose(cluster, exchange, [tensor]) if num_ranks > 1 else None
        num_partitions = choice.num_partitions if choice and choice.is_compressed else 0
        if num_partitions > most_shared:
            yield from _cut(tensor, num_partitions, num_ranks, exchange)
            continue
        key = tensor.dtype, num_partitions > 0
        held.setdefault(key, []).append(tensor)
        if sum(one.size_bytes for one in held[key]) >= bulk_bytes:
            yield _together(cluster, exchange, held.pop(key), key[1])
    for (_, is_compressed), tensors in held.items():
        yield _together(cluster, exchange, tensors, is_compressed)


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


def _may_share(exchange: ExchangeSetting) -> bool:
    """Whether gradients that share a message are encoded as each would be alone."""
    traits = algorithm_by_name(exchange.compressor, exchange.settings).traits
    return bool(traits.layout is not Layout.SPARSE or traits.shared_scale)


def _choose(
    cluster: Cluster, exchange: ExchangeSetting, tensors: Sequence[ProfiledTensor]
) -> LeastCost:
    """The cost model's advice for gradients that travel together."""
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
    return cost.choose(
        sum(tensor.numel for tensor in tensors),
        sum(tensor.size_bytes for tensor in tensors),
        sum(_payload_bytes(exchange, tensor, cluster) for tensor in tensors),
    )


def _payload_bytes(exchange: ExchangeSetting, tensor: ProfiledTensor, cluster: Cluster) -> float:
    """Bytes that a whole gradient becomes: r m."""
    dtype = getattr(torch, tensor.dtype)
    made: Any = algorithm_by_name(exchange.compressor, exchange.settings)
    if isinstance(made, Compressor):
        return made.typical(TensorSpec("", tensor.numel, dtype)).size_bytes
    spec = TensorSpec("", tensor.numel, dtype, (tensor.shape,))
    sent_bytes: float = made.expected_bytes(spec, cluster.num_ranks)[0]
    return sent_bytes / travel("all_reduce", cluster.num_ranks).copies


def _cut(
    tensor: ProfiledTensor, num_partitions: int, num_ranks: int, exchange: ExchangeSetting
) -> list[PlannedMessage]:
    """A message for each batch of as many partitions as there are ranks, and one for the rest.

    The exchange cuts a message into its partitions at multiples of 8 elements, so those of a tiny
    gradient may be empty.
    """
    count = min(num_partitions, tensor.numel)
    found = []
    for first in range(0, count, num_ranks):
        last = min(first + num_ranks, count)
        start, stop = (tensor.numel * place // count for place in (first, last))
        chunk = Chunk(tensor=tensor.name, start=start, stop=stop)
        is_full = exchange.collective is None or last - first == num_ranks
        name = _name(exchange, None if is_full else last - first)
        found.append(PlannedMessage(chunks=(chunk,), exchange=name))
    return found


def _name(exchange: ExchangeSetting, partitions: int | None) -> str:
    """The name, in the plan, of an exchange of so many partitions; None: one a rank."""
    return exchange.compressor if partitions is None else f"{exchange.compressor} in {partitions}"


def _used(
    messages: Sequence[PlannedMessage], exchange: ExchangeSetting, num_ranks: int
) -> dict[str, ExchangeSetting]:
    """The exchanges that messages name, which differ in their number of partitions."""
    made = {_name(exchange, None): exchange}
    for partitions in range(1, num_ranks):
        few = {"partitions": partitions}
        made[_name(exchange, partitions)] = exchange.model_copy(update={"collective_settings": few})
    used = dict.fromkeys(message.exchange for message in messages)
    return {name: made[name] for name in used if name in made}


def _together(
    cluster: Cluster, exchange: ExchangeSetting, tensors: list[ProfiledTensor], is_compressed: bool
) -> PlannedMessage:
    """One message; of at most as many partitions as there are ranks, if it is compressed."""
    chunks = tuple(Chunk(tensor=one.name, start=0, stop=one.numel) for one in tensors)
    if not is_compressed:
        return PlannedMessage(chunks=chunks)
    num_partitions = _choose(cluster, exchange, tensors).num_partitions
    is_full = exchange.collective is None or num_partitions >= cluster.num_ranks
    return PlannedMessage(
        chunks=chunks, exchange=_name(exchange, None if is_full else num_partitions)
    )


EXAMPLES = (
    secopa,
    partial(secopa, collective="casync_ring", bulk_bytes=1000, credit=1),
    partial(secopa, compressor="dgc", density=0.1),
    partial(secopa, compressor="powersgd", collective="allreduce"),
)
