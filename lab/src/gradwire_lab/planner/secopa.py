"""secopa: each gradient is compressed and partitioned as a cost model advises.

Source: Wu et al., "HiPress" (IEEE TPDS 2023), section 3.3, selective compression and
    partitioning (SeCoPa), with equations 1 and 2 and tables 2 and 3; section 6.1 for
    aggregators that sit with the workers. The equations are in
    ``planning/casync_cost.py``.
Differences from the paper:
    - A gradient of at most N partitions is one message, whose exchange is told their
      number; aggregators of fewer than N take turns from message to message. One of
      more is ceil(K / N) messages, all of N partitions but the last, which has the
      rest.
    - What stays uncompressed goes by an all-reduce, which is CaSync-Ring with K = N. If
      some ranks only aggregate, it goes to them too.
    - Section 3.2's bulk communication has a coordinator that batches small gradients of
      one destination by size or time-out. Here gradients of one dtype share a message,
      in backward order, until it holds ``bulk_bytes``. Compressed ones share messages
      of their own, of as many partitions as the cost model advises for their sum: a
      partition is what goes to one destination. They are encoded each by itself, in one
      call, which is section 3.2's batch compression. Those of more than N partitions go
      by themselves, as do tensors of a sparsifier, which would see one vector.
    - Curves are the cluster's measured lines; the paper fits them in the first
      iteration.
    - Encodes and decodes of PowerSGD are two and one, and its two all-reduces follow
      each other; table 3 has one of each.
    - At most 16 batches are tried; the paper states no bound.
    - Hosts of several ranks add up uncompressed (section 5.1, local aggregation). The
      paper does not say who compresses for a host. Here each of its L ranks does, an
      L-th of a message. So N is the number of hosts, m the bytes of a share, and T_send
      that of a link of an L-th of the rate, as all L use it at once. Seconds within the
      host are the same compressed or not. For a compressor of low rank one of the L
      ranks encodes a gradient, whole.
Settings: compressor, and its density if it is a sparsifier; collective, "casync_ps",
    "casync_ring", or "allreduce" for a compressor of low rank; bulk_bytes; credit, the
    messages at once; servers, the ranks that only aggregate.
Order: backward; the next forward starts when all communication has ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gradwire.collective.steps.travel import travel
from gradwire.contract import Compressor, Layout
from gradwire.contract.bounds import check_choice, check_share, check_whole
from gradwire.contract.spec import TensorSpec
from gradwire.errors import invalid
from gradwire.exchange.by_name import algorithm_by_name
from gradwire.exchange.planned import exchange_of_setting
from gradwire.exchange.without_data import expected_bytes
from gradwire.planning.buckets import check_bytes
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import (
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
    Setting,
)
from gradwire.planning.data.profile import Profile, ProfiledTensor

from ..planning.casync_cost import CaSyncCost, LeastCost
from ..planning.curves import check_credit
from ..planning.lanes import backward_order

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
    servers: int | None = None,
) -> Plan:
    """HiPress's plan of selective compression and partitioning for a cluster.

    Args:
        profile: The model's layers.
        cluster: Ranks, links, and the measured costs of ``compressor``.
        compressor: The compressor's name, by default "onebit".
        density: The kept fraction k/n of a sparsifier. Default: the compressor's own.
        collective: "casync_ps" (the default), "casync_ring", or "allreduce" for a
            compressor of low rank.
        bulk_bytes: Bytes at which a message of small gradients is closed, by default 4
            MiB.
        credit: The number of messages on their way at once, by default 4.
        servers: The number of the cluster's ranks that hold no model and only
            aggregate, for "casync_ps". None (the default): each rank trains.

    Returns:
        The plan.

    Raises:
        InvalidSetting: The cluster has not measured the compressor, or a value is out
            of range.

    >>> from gradwire import catalogue
    >>> from gradwire.planning.data.cluster import CodecFit, LineFit
    >>> line = LineFit(alpha_s=1e-5, per_unit_s=1e-10)
    >>> codecs = {"onebit": CodecFit(encode=line, decode=line, merge=line)}
    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e8, codecs=codecs)
    >>> plan = secopa(catalogue.load("vgg16"), cluster)
    >>> {one.compressor for one in plan.exchanges.values()}
    {'onebit'}
    """
    check_bytes("bulk_bytes", bulk_bytes)
    check_credit(credit)
    if density is not None:
        check_share("density", density)
    setting, made = _exchange(compressor, density, collective)
    if servers is not None:
        setting = _served(setting, servers, cluster)
    maker = _Maker(cluster, cluster.shares, setting, made, servers or 0)
    messages = tuple(maker.messages(profile, bulk_bytes))
    settings: dict[str, Setting] = {
        "compressor": compressor,
        "collective": collective,
        "bulk_bytes": bulk_bytes,
        "credit": credit,
    }
    if density is not None:
        settings["density"] = density
    if servers is not None:
        settings["servers"] = servers
    return Plan(
        planner="secopa",
        model=profile.model,
        settings=settings,
        messages=messages,
        credit=credit,
        exchanges=maker.exchanges,
    )


def _exchange(
    compressor: str, density: float | None, collective: str
) -> tuple[ExchangeSetting, Any]:
    """The exchange of what is compressed, and its algorithm; refuses what the cost
    model has no constants for.
    """
    check_choice("collective", collective, COLLECTIVES)
    settings: dict[str, Setting] = {}
    if density is not None:
        settings["density"] = density
    made: Any = algorithm_by_name(compressor, settings)
    is_pair = isinstance(made, Compressor)
    if not is_pair and made.traits.layout is not Layout.LOW_RANK:
        accepted = "a compressor that a collective takes, or one of low rank"
        raise invalid(
            "compressor", compressor, accepted, "see gradwire list compressor"
        )
    if is_pair == (collective == "allreduce"):
        accepted = "'casync_ps' or 'casync_ring'" if is_pair else "'allreduce'"
        raise invalid(
            f"collective of {compressor}", collective, accepted, "write one of these"
        )
    exchange = ExchangeSetting(
        compressor=compressor,
        settings=settings,
        collective=collective if is_pair else None,
        error_feedback=made.traits.error_feedback,
    )
    exchange_of_setting(exchange)  # refuses what cannot be paired
    return exchange, made


def _served(
    setting: ExchangeSetting, servers: int, cluster: Cluster
) -> ExchangeSetting:
    """The exchange by servers of their own."""
    check_whole("servers", servers, "leave it out for none")
    workers = cluster.num_ranks - servers
    if setting.collective != "casync_ps" or workers < 1 or cluster.ranks_per_host > 1:
        accepted = "fewer than the ranks, by casync_ps, with one rank on each host"
        raise invalid("servers", servers, accepted, "leave it out")
    served = setting.model_copy(update={"collective_settings": {"servers": servers}})
    exchange_of_setting(served)  # refuses what is no number of servers
    return served


@dataclass(frozen=True)
class _Maker:
    """Makes messages of gradients that travel together, and names their exchanges."""

    cluster: Cluster
    hosts: Cluster
    """The cluster as an exchange sees it: one rank of each host."""
    setting: ExchangeSetting
    made: Any
    """The algorithm of the setting."""
    servers: int = 0
    """The ranks that only aggregate."""
    exchanges: dict[str, ExchangeSetting] = field(default_factory=dict)
    """The exchanges of the messages, which differ in their number of partitions."""

    def messages(self, profile: Profile, bulk_bytes: int) -> Iterator[PlannedMessage]:
        num_ranks = self.hosts.num_ranks
        traits = self.made.traits
        # Gradients that share a message are encoded as each would be alone, or do not
        # share any.
        may_share = traits.layout is not Layout.SPARSE or traits.shared_scale
        most_shared = self.aggregators if may_share else 0
        waiting: dict[tuple[str, bool], list[ProfiledTensor]] = {}
        """Gradients that wait for others of their dtype; all or none are compressed."""
        for tensor in backward_order(profile).tensors:
            choice = None
            if num_ranks > 1:
                choice = self._choose([tensor])
            num_partitions = 0
            if choice and choice.is_compressed:
                num_partitions = choice.num_partitions
            if num_partitions > most_shared:
                yield from self._cut(tensor, num_partitions)
                continue
            key = tensor.dtype, num_partitions > 0
            waiting.setdefault(key, []).append(tensor)
            if sum(tensor.size_bytes for tensor in waiting[key]) >= bulk_bytes:
                yield self._together(waiting.pop(key), key[1])
        for (_, is_compressed), tensors in waiting.items():
            yield self._together(tensors, is_compressed)

    @property
    def aggregators(self) -> int:
        """The most partitions of a message."""
        return self.servers or self.hosts.num_ranks

    def _choose(self, tensors: Sequence[ProfiledTensor]) -> LeastCost:
        """The cost model's advice for gradients that travel together."""
        name = self.setting.compressor
        if name not in self.hosts.codecs:
            measured = ", ".join(sorted(self.hosts.codecs)) or "none"
            raise invalid(
                "compressor",
                name,
                f"one whose encode and decode the cluster's file holds ({measured})",
                "measure it with gradwire profile, without --no-codecs, and "
                "give its cluster.json",
            )
        cost = CaSyncCost.of(
            self.hosts,
            self.hosts.codecs[name],
            is_ring=self.setting.collective == "casync_ring",
            traits=self.made.traits,
            servers=self.servers,
        )
        numel = sum(self._share(tensor).numel for tensor in tensors)
        if cost.is_low_rank:  # each tensor is encoded by one rank of a host
            numel = max(numel, *(tensor.numel for tensor in tensors))
        return cost.choose(
            numel,
            sum(self._share(tensor).size_bytes for tensor in tensors),
            sum(map(self._payload_bytes, tensors)),
        )

    def _share(self, tensor: ProfiledTensor) -> TensorSpec:
        """The spec of what a rank exchanges of a gradient."""
        return TensorSpec(
            "", self.cluster.share(tensor.numel), getattr(torch, tensor.dtype)
        )

    def _payload_bytes(self, tensor: ProfiledTensor) -> float:
        """Bytes that a rank's share of a gradient becomes: r m.

        Of one that stays whole it is an equal share of the bytes that cross the host's
        link.
        """
        if isinstance(self.made, Compressor):
            return self.made.typical(self._share(tensor)).size_bytes
        spec = TensorSpec(
            "", tensor.numel, getattr(torch, tensor.dtype), (tensor.shape,)
        )
        ranks = self.hosts.num_ranks
        count = self.cluster.ranks_per_host
        sent_bytes = expected_bytes(self.made, spec, ranks)
        assert sent_bytes is not None
        return sent_bytes[0] / travel("all_reduce", ranks).copies / count

    def _cut(
        self, tensor: ProfiledTensor, num_partitions: int
    ) -> Iterator[PlannedMessage]:
        """A message for each batch of as many partitions as there are hosts, and one
        for the rest.

        The exchange cuts a message into its partitions at multiples of 8 elements, so
        those of a tiny gradient may be empty.
        """
        count = min(num_partitions, tensor.numel)
        for first in range(0, count, self.aggregators):
            last = min(first + self.aggregators, count)
            start, stop = (tensor.numel * place // count for place in (first, last))
            chunk = Chunk(tensor=tensor.name, start=start, stop=stop)
            yield self._message((chunk,), last - first)

    def _together(
        self, tensors: list[ProfiledTensor], is_compressed: bool
    ) -> PlannedMessage:
        """One message.

        If it is compressed, it has at most as many partitions as there are hosts.
        """
        chunks = tuple(
            Chunk(tensor=tensor.name, start=0, stop=tensor.numel) for tensor in tensors
        )
        if not is_compressed and self.servers:
            plain = ExchangeSetting(
                compressor="none",
                collective="casync_ps",
                collective_settings=self.setting.collective_settings,
            )
            self.exchanges["uncompressed"] = plain
            return PlannedMessage(chunks=chunks, exchange="uncompressed")
        if not is_compressed:
            return PlannedMessage(chunks=chunks)
        return self._message(chunks, self._choose(tensors).num_partitions)

    def _message(self, chunks: tuple[Chunk, ...], partitions: int) -> PlannedMessage:
        """A compressed message.

        The exchange is told of partitions where they are few.
        """
        name = self.setting.compressor
        setting = self.setting
        if setting.collective is not None and partitions < self.aggregators:
            name = f"{name} in {partitions}"
            few = {**setting.collective_settings, "partitions": partitions}
            setting = setting.model_copy(update={"collective_settings": few})
        self.exchanges[name] = setting
        return PlannedMessage(chunks=chunks, exchange=name)


EXAMPLES = (
    secopa,
    partial(secopa, collective="casync_ring", bulk_bytes=1000, credit=1),
    partial(secopa, compressor="dgc", density=0.1),
    partial(secopa, compressor="dgc", density=0.1, collective="casync_ring"),
    partial(secopa, compressor="powersgd", collective="allreduce"),
)
