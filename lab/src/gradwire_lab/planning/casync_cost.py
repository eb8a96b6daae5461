"""CaSync's cost model: whether to compress a gradient, and how many partitions.

Source: HiPress (Wu et al.), section 3.3, equations 1 and 2 with tables 2 and 3; section
    6.1 for aggregators that sit with the workers. Servers apart from workers have table
    3's own numbers.
Differences from the paper: a partition that is decoded to be added takes the seconds of
    a merge, which does both in one pass. ``CaSyncCost`` says how more partitions than
    ranks count. Payloads that vary in size (DGC's) also take the transfers that tell
    their sizes, which table 3 leaves out: N for casync_ring, and 2 (N - 1) for
    casync_ps.

One gradient of m bytes in K partitions among N ranks takes, uncompressed and
compressed,

    T_orig(m, K) = alpha T_send(m / K)
    T_cpr(m, K) = alpha T_send(r m / K) + beta T_enc(m / K) + gamma T_dec(r m / K)

where alpha is the number of transfers one after the other, 2 (N - 1); beta and gamma
are the numbers of encodes and decodes that overlap with none: K and N for casync_ps, N
and N for casync_ring, and 1 and 1 for what is low rank, which is never cut. With
servers apart from N workers alpha is 2 N, beta K + 1, and gamma N + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradwire.collective.steps.sizes import SIZE_BYTES
from gradwire.contract import Layout, Traits
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import Floats, LineFit

from .curves import measured_each

MOST_BATCHES = 16
"""The most batches of N partitions each that a gradient is cut into."""


class LeastCost(NamedTuple):
    """The fastest way of one gradient under the cost model."""

    is_compressed: bool
    num_partitions: int
    """K, the smallest number that is as fast as any."""
    seconds: float


@dataclass(frozen=True)
class CaSyncCost:
    """The seconds that CaSync takes for a gradient among ``num_ranks``, two or more.

    They are the workers, of which there may be one, if there are ``servers``. More than
    N partitions go in ceil(K / N) batches, or ceil(K / servers) of them, one behind the
    other, each of which takes alpha transfers. The paper prints no more than that. With
    casync_ps the decodes of a batch are taken to pass beside the transfers of the next,
    so that those of the last batch alone count. Otherwise table 7's twelve partitions
    on four nodes would be no minimum. On a ring every hop waits for its own encodes and
    decodes, so each batch takes as long as the first.
    """

    num_ranks: int
    is_ring: bool
    send: LineFit
    """A transfer between two ranks, over bytes."""
    codec: CodecFit
    is_low_rank: bool = False
    announces_sizes: bool = False
    """Whether ranks announce the sizes of their payloads first."""
    servers: int = 0
    """The number of ranks that only aggregate."""

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        codec: CodecFit,
        *,
        is_ring: bool,
        traits: Traits,
        servers: int = 0,
    ) -> CaSyncCost:
        """The cost of a codec measured on a cluster, for payloads of these traits.

        ``servers`` of the cluster's ranks only aggregate.
        """
        is_low_rank = traits.layout is Layout.LOW_RANK
        announces_sizes = not (is_low_rank or traits.exact_size)
        send = cluster.line("send")
        workers = cluster.num_ranks - servers
        return cls(workers, is_ring, send, codec, is_low_rank, announces_sizes, servers)

    @property
    def alpha(self) -> int:
        """Transfers one after the other, for all partitions of a batch at once."""
        return 2 * self._num_merges

    @property
    def _num_merges(self) -> int:
        """The payloads that an aggregator receives of each gradient."""
        if self.servers:
            return self.num_ranks
        return self.num_ranks - 1

    def plain_each_s(self, size_bytes: float, num_K: Floats) -> Floats:
        """Seconds uncompressed (equation 1) for each number of partitions."""
        return (
            self._batches(num_K)
            * self.alpha
            * measured_each(self.send, size_bytes / num_K)
        )

    def compressed_each_s(
        self, numel: int, payload_bytes: float, num_K: Floats
    ) -> Floats:
        """Seconds compressed (equation 2) for each number of partitions.

        ``payload_bytes`` are of the whole gradient: r m.
        """
        batches_K = self._batches(num_K)
        sends_K = (
            batches_K * self.alpha * measured_each(self.send, payload_bytes / num_K)
        )
        if self.announces_sizes:
            announced = self.num_ranks if self.is_ring else self.alpha
            sends_K = sends_K + batches_K * announced * self.send.measured_s(SIZE_BYTES)
        numel_K = numel / num_K
        ranks = self.num_ranks
        encode_K = _each_s(self.codec.encode, numel_K)
        decode_K = _each_s(self.codec.decode, numel_K)
        decodes_K = self._num_merges * _each_s(self.codec.merge, numel_K) + decode_K
        if self.is_ring:
            return sends_K + batches_K * (ranks * encode_K + decodes_K)
        num_encodes_K = num_K + bool(self.servers)
        return sends_K + num_encodes_K * encode_K + decodes_K

    def low_rank_s(self, numel: int, payload_bytes: float) -> float:
        """Seconds of a low-rank exchange, uncut, whose payloads are summed on the way.

        PowerSGD sums one factor, and then the other, of about half the payload each. So
        it takes two times alpha transfers. Its encode is two computations of the
        measured line.
        """
        sends_s = 2 * self.alpha * self.send.measured_s(payload_bytes / 2)
        return (
            sends_s
            + 2 * self.codec.encode.seconds(numel)
            + self.codec.decode.seconds(numel)
        )

    def choose(self, numel: int, size_bytes: int, payload_bytes: float) -> LeastCost:
        """Whether to compress a gradient, and its partitions.

        What ties stays uncompressed.
        """
        num_K = np.arange(1.0, self._aggregators * MOST_BATCHES + 1)
        plain = _least(self.plain_each_s(size_bytes, num_K))
        if self.is_low_rank:
            small = 1, self.low_rank_s(numel, payload_bytes)
        else:
            small = _least(self.compressed_each_s(numel, payload_bytes, num_K))
        is_compressed = small[1] < plain[1]
        return LeastCost(is_compressed, *(small if is_compressed else plain))

    def _batches(self, num_K: Floats) -> Floats:
        return np.ceil(num_K / self._aggregators)

    @property
    def _aggregators(self) -> int:
        return self.servers or self.num_ranks


def _each_s(line: LineFit, numel_K: Floats) -> Floats:
    """Seconds by the fitted line, as the simulator prices a computation."""
    return line.alpha_s + line.per_unit_s * numel_K


def _least(seconds_K: Floats) -> tuple[int, float]:
    """The smallest K of least seconds, and these; rounding decides nothing."""
    least_s = float(seconds_K.min())
    first = int(np.argmax(seconds_K <= least_s * (1 + 1e-12)))
    return first + 1, float(seconds_K[first])
