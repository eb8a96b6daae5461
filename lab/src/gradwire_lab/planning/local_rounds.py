"""Local steps without data: the useful time and the bytes of a training to come.

Partial rounds are played on a virtual clock by the steps of a training
(``gradwire.exchange.rounds``). Payloads have a size and no content. In lock step all
ranks wait for the slowest one and for the exchange, so a formula says as much.

Useful time is the share of the ranks' time in local steps that a merge has taken in.
Not modelled in partial rounds: what encodes cost, and what a rank learns while its push
is under way.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from gradwire.collective.steps.tensorwise import tensor_sizes, tensorwise
from gradwire.contract import Compressor
from gradwire.contract.registry import load
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.rounds import (
    FragmentLearner,
    FragmentOwner,
    Merge,
    PartialRounds,
    RoundCodec,
    Rules,
)
from gradwire.exchange.without_data import bytes_of_rank
from gradwire.planning.buckets import buckets, whole_buckets
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.auto.judgement import setting_of
from gradwire.planning.price import iteration_s
from gradwire.runtime.local_steps.local_steps import cut_into
from gradwire.runtime.local_steps.outer import PLAIN

from ..exchange.virtual_rounds import SteppedAnchor, VirtualClock, VirtualRank

ROUNDS = 30
"""Rounds of each fragment that are played."""
EVERY = (5, 10, 20, 50, 100, 200, 500)
EXCHANGES = ("none", "cast16", "uniform")
"""Periods and exchanges that a proposal is made of, the one that loses least first."""
ENOUGH = 0.9
"""The useful time of a proposal."""
OUTER_S = 4e-9
"""Seconds of a core for each parameter of an outer step, as measured: its difference,
its momentum and its copies. Between stated hosts it is not counted, as encoding."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Figures of local steps, on average over rounds."""

    useful_time: float
    """The share of all ranks' time in local steps that a merge has taken in."""
    round_s: float
    """Seconds from one merge of a fragment to its next."""
    ranks_per_round: float
    bytes_per_step: float
    """Bytes that all ranks send, over the local steps of all ranks."""


class Links:
    """The seconds of messages on a cluster's links, and the bytes that ranks send.

    A host's link carries one payload after the other, each way.
    """

    def __init__(self, cluster: Cluster) -> None:
        rate = (cluster.rate_bytes_per_s,)
        self.sent_bytes = [0] * cluster.num_ranks
        self._cluster = cluster
        self._ups = cluster.up_bytes_per_s or rate
        self._downs = cluster.down_bytes_per_s or rate
        self._up_free_s: dict[int, float] = defaultdict(float)
        self._down_free_s: dict[int, float] = defaultdict(float)

    def seconds(self, source: int, target: int, size_bytes: int, now_s: float) -> float:
        """Seconds until a message that leaves now is there."""
        if source == target:
            return 0.0
        cluster = self._cluster
        self.sent_bytes[source] += size_bytes
        src = source // cluster.ranks_per_host
        dst = target // cluster.ranks_per_host
        if src == dst:
            return cluster.within.hop_s + size_bytes / cluster.within.rate_bytes_per_s
        hop_s = cluster.hop_s + cluster.latency_s
        if cluster.latencies_s:
            hop_s = cluster.hop_s + cluster.latencies_s[src][dst]
        if not size_bytes:
            return hop_s
        up_s = size_bytes / self._ups[src % len(self._ups)]
        down_s = size_bytes / self._downs[dst % len(self._downs)]
        sent_s = max(now_s, self._up_free_s[src]) + up_s
        there_s = max(sent_s + hop_s, self._down_free_s[dst] + down_s)
        self._up_free_s[src] = sent_s
        self._down_free_s[dst] = there_s
        return there_s - now_s


class SizedCodec(RoundCodec):
    """A codec of payloads that have the usual size and no content."""

    def __init__(self, codec: Compressor, spec: TensorSpec, world: int) -> None:
        self.spec = TensorSpec(spec.name, 0)
        self.residual_N = None
        sized = tensorwise(codec, tensor_sizes(spec)).for_world(world)
        size_bytes = sized.typical(spec).size_bytes
        self._payload_B = torch.empty(size_bytes, dtype=torch.uint8, device="meta")

    def encode(self, vector_N: Tensor) -> Tensor:
        return self._payload_B

    def decode(self, payload_B: Tensor) -> Tensor:
        return torch.empty(0)


def fragments_of(profile: Profile, count: int) -> list[TensorSpec]:
    """The fragments into which ``gw.local_steps`` cuts a model."""
    shapes = {name: tensor.shape for name, tensor in profile.tensors.items()}
    params = [(name, torch.empty(shapes[name], device="meta")) for name in shapes]
    return [
        TensorSpec(
            "fragment",
            sum(profile.tensors[name].numel for name in names),
            shapes=tuple(shapes[name] for name in names),
        )
        for names in cut_into(params, count)
    ]


def virtual_ranks(
    rules: Rules, specs: Sequence[TensorSpec], codec: Compressor, world: int
) -> list[VirtualRank]:
    """Ranks whose parameters hold nothing."""
    codecs = [SizedCodec(codec, spec, world) for spec in specs]
    ranks = []
    nothing = torch.empty(0)
    for rank in range(world):
        learners = [
            FragmentLearner(
                rank, fragment, sized, rules, nothing, SteppedAnchor(nothing, PLAIN)
            )
            for fragment, sized in enumerate(codecs)
        ]

        def make_owner(fragment: int) -> FragmentOwner:
            return FragmentOwner(fragment, codecs[fragment], rules, world)

        params = [torch.empty(0) for _ in specs]
        rounds = PartialRounds(rank, world, learners, make_owner)
        ranks.append(VirtualRank(rounds, params, lambda step: 1))
    return ranks


def play(
    ranks: Sequence[VirtualRank],
    cluster: Cluster,
    step_s: Sequence[float],
    rounds: int = ROUNDS,
) -> tuple[VirtualClock, Links]:
    """Runs ranks, whose local steps take ``step_s``, until so many rounds closed.

    Rounds that take twice as long as their period end the run earlier.
    """
    links = Links(cluster)
    clock = VirtualClock(
        ranks,
        step_s=lambda rank: step_s[rank],
        delay_s=lambda source, target, size: links.seconds(
            source, target, size, clock.now_s
        ),
        is_held=True,
    )
    owners = [owner for r in ranks for owner in r.rounds.owners.values()]
    latest_s = 2 * rounds * owners[0].rules.every * min(step_s)
    closed = 0
    while closed < rounds and not (closed and clock.now_s > latest_s):
        clock.run(clock.now_s + max(step_s))
        closed = min(owner.version for owner in owners)
    return clock, links


def forecast(
    rules: Rules,
    specs: Sequence[TensorSpec],
    codec: Compressor,
    cluster: Cluster,
    step_s: Sequence[float],
) -> Forecast:
    """The figures of rounds of ranks whose local steps take ``step_s``, by rank.

    Steps that no merge has when the last round closes count as lost, so a training has
    a little more useful time.

    >>> from gradwire.compress.none import none
    >>> cluster = Cluster(num_ranks=2, rate_bytes_per_s=1e9, latency_s=0.01)
    >>> rules = Rules(quorum=1, every=10)
    >>> specs = [TensorSpec("fragment", 1000)]
    >>> fast_and_slow = [0.1, 0.4]
    >>> made = forecast(rules, specs, none(), cluster, fast_and_slow)
    >>> made.useful_time > 0.95, round(made.round_s, 1)
    (True, 1.0)
    """
    ranks = virtual_ranks(rules, specs, codec, cluster.num_ranks)
    clock, links = play(ranks, cluster, step_s)
    merges = {id(m): m for m in clock.sent if isinstance(m, Merge)}.values()
    entries = [
        entry for merge in merges for entry in merge.contributions if entry.weight
    ]
    useful_s = sum(entry.steps * step_s[entry.rank] for entry in entries) / len(specs)
    return Forecast(
        useful_time=useful_s / (clock.now_s * len(ranks)),
        round_s=clock.now_s * len(specs) / len(merges),
        ranks_per_round=len(entries) / len(merges),
        bytes_per_step=sum(links.sent_bytes) / sum(r.rounds.step for r in ranks),
    )


def lock_step(
    every: int,
    profile: Profile,
    exchange: str,
    cluster: Cluster,
    step_s: Sequence[float],
) -> Forecast:
    """The figures if all ranks wait for the slowest one and for the exchange."""
    message = whole_buckets(*buckets(profile))
    plan = Plan(
        planner="lock step",
        model=profile.model,
        messages=(message.model_copy(update={"exchange": exchange}),),
        exchanges={exchange: setting_of(exchange)},
    )
    exchange_s = iteration_s(plan, profile.slower(0.0), cluster)
    spec = fragments_of(profile, 1)[0]
    if cluster.processors is not None:
        exchange_s += OUTER_S * spec.numel / (cluster.cores or 1)
    round_s = every * max(step_s) + exchange_s
    made = exchange_for(load("compress", exchange)())
    sent_bytes = bytes_of_rank(made, spec, cluster.num_ranks) or 0
    return Forecast(
        useful_time=every * mean(step_s) / round_s,
        round_s=round_s,
        ranks_per_round=cluster.num_ranks,
        bytes_per_step=sent_bytes / every,
    )


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings of ``gw.local_steps``, with the figures that they are to have.

    ``quorum`` is None in lock step.
    """

    every: int
    exchange: str
    quorum: int | None
    forecast: Forecast
    keeps_up: bool
    """Whether enough time is useful, and the links carry a round in each period."""


def proposals(
    profile: Profile, cluster: Cluster, step_s: Sequence[float]
) -> list[Proposal]:
    """The best lock step and the best quorum of half of the ranks, the better first.

    Each has the shortest period at which it keeps up, as each local step then improves
    the loss most, and then the exchange that loses least. So the shorter period of the
    two is better. Lock step is better at the same period.
    """
    every_way = [(every, exchange) for every in EVERY for exchange in EXCHANGES]
    world = cluster.num_ranks
    for every, exchange in every_way:
        waiting = lock_step(every, profile, exchange, cluster, step_s)
        is_useful = waiting.useful_time >= ENOUGH
        whole = Proposal(
            every=every,
            exchange=exchange,
            quorum=None,
            forecast=waiting,
            keeps_up=is_useful,
        )
        if is_useful:
            break
    specs = fragments_of(profile, min(world, len(profile.tensors)))
    for every, exchange in every_way:
        quorum = max(1, world // 2)
        rules = Rules(quorum=quorum, every=every, fragments=len(specs))
        codec = load("compress", exchange)()
        played = forecast(rules, specs, codec, cluster, step_s)
        is_in_time = played.round_s * ENOUGH <= every * min(step_s)
        partial_rounds = Proposal(
            every=every,
            exchange=exchange,
            quorum=quorum,
            forecast=played,
            keeps_up=is_in_time and played.useful_time >= ENOUGH,
        )
        if partial_rounds.keeps_up:
            break
    return sorted((whole, partial_rounds), key=lambda p: (not p.keeps_up, p.every))
