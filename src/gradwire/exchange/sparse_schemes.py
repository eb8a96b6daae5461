"""Predicted seconds of every scheme of sparse synchronisation, by formula.

This is the one rule that says where rows pay: a plan asks it about a measured profile,
and a step about counts that ranks have just announced (``counted``).

Source: ZEN (OSDI 2025), section 2.3: equation 1 (Balanced Parallelism), and AGsparse by
    its row of table 3. The paper's other schemes are in the package gradwire-lab, with
    their formulas.
Differences from the paper: its times are bytes over a rate. Here the cluster
    prices every verb, with the latency of each round and of announcing sizes. Host work
    (looking for non-zero elements, moving entries) is added. Formats are the formats on
    the wire. Hashing leaves a small imbalance (theorem 2), which counts.

All is a pure function of a profile and a cluster, which all ranks share, and of the
schemes that are installed, which ``attach`` compares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import entry_points
from math import ceil, log, sqrt
from typing import NamedTuple

import torch

from ..collective.steps.push_pull import Cut, MergeCounts, PushPull
from ..collective.steps.rounds import abreast
from ..collective.steps.sizes import SIZE_BYTES
from ..collective.steps.travel import travel
from ..collective.zen import zen
from ..compress.nonzero import nonzero
from ..contract.registry import load
from ..contract.spec import TensorSpec
from ..kernels.sparse.entries import num_units
from ..kernels.sparse.formats.coo import coo
from ..planning.data.cluster import Cluster
from ..planning.data.sparsity import Densification, Handling, UnitSparsity

MERGE_COUNTS_BYTES = SIZE_BYTES * len(MergeCounts._fields)
"""Bytes that a server sends each other rank about its part, beside the part."""

DENSE = "dense"
"""The name of the scheme that sends all elements."""

TIE = 0.005
"""Predictions that lie closer together than this share of them are one prediction."""


class Prediction(NamedTuple):
    """Seconds of one scheme: waits for rounds, bytes, and the host's own work."""

    scheme: str
    latency_s: float
    transfer_s: float
    host_s: float
    why: str = ""
    """The cause of its bytes, in brackets, for explanations."""

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s + self.host_s


@dataclass(frozen=True, kw_only=True)
class SchemeInputs:
    """One gradient on one cluster.

    Where hosts have several ranks, a rank's share of their sum.
    """

    numel: int
    units: UnitSparsity
    blocks: UnitSparsity
    cluster: Cluster
    dtype: torch.dtype = torch.float32
    handling: Handling = field(default_factory=Handling)
    within_s: float = 0.0
    """Seconds of transfers within the host, which every scheme takes."""

    @property
    def world(self) -> int:
        return self.cluster.num_ranks

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec("", self.numel, self.dtype)

    @property
    def dense_bytes(self) -> int:
        return self.spec.size_bytes

    def coo_bytes(self, count: float, units: UnitSparsity) -> int:
        """Bytes of so many units in coordinates."""
        return coo().size_bytes(round(count), units.num_units, units.width, self.dtype)

    def own(self, units: UnitSparsity) -> float:
        """Non-zero units of one rank."""
        return units.density * units.num_units

    def merged(self, units: UnitSparsity, num_ranks: float) -> float:
        """Non-zero units of the sum of so many ranks' gradients."""
        return self.own(units) * units.gamma(max(1, round(num_ranks)))

    def host_s(self, moved: float, units: UnitSparsity) -> float:
        """Scanning the gradient once, and moving so many units."""
        handling = self.handling
        return handling.scan_s * self.numel + handling.entry_s * moved * units.width

    def parts_s(self, *verbs: tuple[str, float]) -> tuple[float, float]:
        """Seconds of latency and of bytes of (verb, size in bytes) in a row."""
        parts = [self.cluster.parts_s(verb, size_bytes) for verb, size_bytes in verbs]
        return sum(latency_s for latency_s, _ in parts), sum(
            work_s for _, work_s in parts
        )


def dense_cost(at: SchemeInputs) -> Prediction:
    """An all-reduce of all elements."""
    parts_s = at.parts_s(("all_reduce", at.dense_bytes))
    return Prediction(DENSE, *parts_s, 0.0, "(zeros are most of them) ")


def allgather_sparse_cost(at: SchemeInputs) -> Prediction:
    """AGsparse: everybody gets everybody's coordinates and adds them up."""
    units = at.units
    count = at.own(at.units)
    verbs = (("all_gather", SIZE_BYTES), ("all_gather", at.coo_bytes(count, units)))
    host_s = at.host_s((1 + at.world) * count, units)
    return Prediction(
        "allgather_sparse",
        *at.parts_s(*verbs),
        host_s,
        "(what ranks share comes once from each) ",
    )


def zen_cost(at: SchemeInputs, formats: str = "smallest") -> Prediction:
    """Equation 1, Balanced Parallelism: hashed parts, in these ``formats``."""
    uneven = expected_imbalance(at.merged(at.units, at.world), at.world)
    return push_pull_cost(
        zen(formats=formats), at, at.units, (uneven, uneven), "(push and pull) "
    )


PullSeconds = Callable[[SchemeInputs, int, int], tuple[float, float]]


def gathered_s(at: SchemeInputs, fullest: int, usual: int) -> tuple[float, float]:
    """A pull's seconds of latency and transfer, by bytes of fullest and other parts."""
    return at.parts_s(("all_gather", fullest))


def push_pull_cost(
    collective: PushPull,
    at: SchemeInputs,
    units: UnitSparsity,
    imbalance: tuple[float, float],
    why: str = "",
    pull_s: PullSeconds = gathered_s,
) -> Prediction:
    """The fullest part's rank decides.

    Its push and pull have ``imbalance`` times the mean.
    """
    scheme = type(collective).__name__
    if at.world == 1:
        return Prediction(scheme, 0.0, 0.0, 0.0)
    cut = collective.cut(nonzero(width=at.units.width), at.spec, at.world)
    count = at.own(units)
    merged = at.merged(units, at.world)
    uneven_push, uneven_pull = imbalance
    push = _part(cut, uneven_push * count / at.world)
    pull = _part(cut, uneven_pull * merged / at.world)
    others = at.world - 1
    announced_s = at.parts_s(
        ("all_to_all", SIZE_BYTES * at.world),
        ("all_gather", MERGE_COUNTS_BYTES),
    )
    rest = _part(cut, max(0.0, merged - pull) / others)
    sums = (
        cut.pulled(collective.pull_format(cut, 0, n), 0, n).slot_bytes
        for n in (pull, rest)
    )
    pulled_s = pull_s(at, *sums)
    pushed = cut.pushed(collective.push_format(cut, 0, push), 0, push)
    send_s = at.parts_s(("send", pushed.slot_bytes))
    rounds = ceil(others / abreast(pushed.slot_bytes, at.world))
    latency_s = announced_s[0] + rounds * send_s[0] + pulled_s[0]
    transfer_s = announced_s[1] + others * send_s[1] + pulled_s[1]
    host_s = at.host_s((2 + uneven_push) * count + merged, units)
    return Prediction(scheme, latency_s, transfer_s, host_s, why)


def _part(cut: Cut, count: float) -> int:
    """Whole units of the first part, which is the longest."""
    return min(round(count), cut.parts[0].length)


def expected_imbalance(count: float, world: int) -> float:
    """The largest of ``world`` hashed parts over an equal one, for so many units.

    About 1 + sqrt(2 n ln n / count): the largest of n nearly normal loads. Theorem 2
    bounds it by the same form.

    >>> round(expected_imbalance(5e6, 128), 3)
    1.016
    """
    if count <= 0 or world == 1:
        return 1.0
    return min(1 + sqrt(2 * world * log(world) / count), float(world))


# ---- the choice ----------------------------------------------------------------------

Scheme = Callable[[SchemeInputs], Prediction]


@cache
def schemes(*, of_rows: bool = False, by_counts: bool = False) -> dict[str, Scheme]:
    """The formula of each scheme that is installed, by its collective's name.

    With ``of_rows`` only schemes whose collectives carry gradients that come as rows;
    with ``by_counts`` only schemes whose bytes follow from counts, wherever units lie.
    The dense one is of neither. Other packages add theirs by entry points. Where two
    tie, the earlier is taken.
    """
    points = sorted(
        entry_points(group="gradwire.sparse_schemes"), key=lambda point: point.name
    )
    formulas = {"allgather_sparse": allgather_sparse_cost, "zen": zen_cost}
    formulas |= {point.name: point.load() for point in points}
    if not (of_rows or by_counts):
        return {DENSE: dense_cost, **formulas}
    kinds = {name: load("collective", name) for name in formulas}
    return {
        name: formulas[name]
        for name, kind in kinds.items()
        if (kind.carries_rows or not of_rows)
        and (kind.dimensions.balance != "imbalanced" or not by_counts)
    }


class SchemeChoice(NamedTuple):
    """The scheme for one gradient, and all predictions, the fastest first."""

    scheme: str
    predictions: tuple[Prediction, ...]


def fastest_scheme(
    at: SchemeInputs, among: Mapping[str, Scheme] | None = None
) -> SchemeChoice:
    """The fastest of these schemes, by default of all; the first of equal ones."""
    every = [scheme(at) for scheme in (schemes() if among is None else among).values()]
    predictions = [
        prediction._replace(latency_s=at.within_s + prediction.latency_s)
        for prediction in every
    ]
    ranked = sorted(predictions, key=lambda prediction: prediction.seconds)
    least_s = ranked[0].seconds
    best = next(
        prediction
        for prediction in predictions
        if prediction.seconds <= least_s * (1 + TIE)
    )
    ranked.remove(best)
    return SchemeChoice(best.scheme, (best, *ranked))


def counted(
    counts: Sequence[int],
    numel: int,
    width: int,
    dtype: torch.dtype,
    growth: float,
    cluster: Cluster | None = None,
) -> SchemeInputs:
    """The setting of ranks with so many non-zero units each; the largest count decides.

    No profile is needed: bytes follow from the counts. Without a ``cluster`` links
    carry 1 Gbit/s. ``growth`` is how many times that many units the mean of an earlier
    step had; 0 where none is known, and then ranks are taken to share nothing.
    """
    total = num_units(numel, width)
    world = len(counts)
    density = max(counts) / total
    ratio = (
        min(max(growth, 1.0), float(world), 1 / density) if growth and density else 0.0
    )
    grown = (Densification(ranks=world, ratio=ratio),) if ratio and world > 1 else ()
    units = UnitSparsity(
        width=width, num_units=total, density=density, densification=grown
    )
    cluster = _links(world) if cluster is None else cluster
    return SchemeInputs(
        numel=numel, units=units, blocks=units, cluster=cluster, dtype=dtype
    )


RATE_BYTES_PER_S = 1.25e8
"""1 Gbit: between a slow link, where bytes count, and a fast one, where rounds do."""


@lru_cache(maxsize=64)
def _links(world: int) -> Cluster:
    return Cluster(num_ranks=world, rate_bytes_per_s=RATE_BYTES_PER_S)


def other_way_s(at: SchemeInputs, size_bytes: int) -> float:
    """Seconds of an exchange that is no scheme, by the bytes that a rank sends."""
    copies = travel("all_reduce", at.world).copies
    return sum(at.parts_s(("all_reduce", max(1, size_bytes) / copies)))
