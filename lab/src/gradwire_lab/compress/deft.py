"""deft: the largest elements of each layer, by its norm, each layer by one rank.

Source: Yoon and Oh, ICPP 2023, "DEFT: exploiting gradient norm difference between model
    layers for scalable gradient sparsification", algorithms 1 (``_support``) to 5.
Differences from the paper (what one algorithm does otherwise stands above it; with
    ``allocation="paper"`` algorithms 3 and 4 are as printed):
    - The layers are those of one message: n_g is its number of elements, and norms are
      compared within it. Fused into one message, a model is treated as in the paper.
    - Layers are weighed by what our selection costs. See ``work``.
    - A layer of which all is sent (k is its size, as of one element) is common to all
      ranks: no rank selects in it and none of its indices travels. As k comes from each
      rank's own norms, ranks might differ in which these are: the delegate alone says
      so, with the allocation.
    - The delegate sends each layer's owner and not lists of layers. An index travels
      relative to the part of the rank that selected it, in the fewest whole bytes
      (int64 in published code).
    - Among one rank nothing is selected.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 37 to 40 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md).
Density: a layer's k is that of its owner's norms. The sum of any one rank's k is
    exactly max(round(density * N), L), but for layers of zeros, so the floor is L / N;
    what arrives differs from that as norms do between ranks. As printed, it is up to L
    more, and less where small layers cannot take their share. With gradients that are
    half alike, layers 100-fold apart and error feedback: by up to 4 % at density 0.02
    and 6 % at 0.1, among 2 to 16 ranks. At worst, if the gradient of every rank were
    nothing but the layers that it owns, W times as much.
Wire: a broadcast of L numbers of 1 byte (2 from 256 ranks on) by the delegate; 4 bytes
    to each other rank, how many indices follow; the indices, (W-1) * b * (the most that
    a rank selected), b the fewest whole bytes (1 to 4) for the largest part; an
    all-reduce of the K values of the union and one that tells whether all is finite, in
    the working dtype -> 2(W-1)/W * 4 * (K + 1) bytes a rank (8 for float64).
State: the partition, which follows from the spec; step, int64, the same on all ranks:
    rank step mod W is the delegate.
Contributed: this rank's values at the union of what all ranks selected.

Norms are of all layers, as each is weighed against all others: that pass does not get
shorter with more ranks. But it is the pass that adds gradient and residual up, which is
needed anyway.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.steps.shares import pack
from gradwire.compress._coo import check_addressable
from gradwire.contract import Member, Traits
from gradwire.contract.bounds import check_choice
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import AllGather, Broadcast, Steps
from gradwire.errors import RanksDiffer, invalid

from ._gather import lay_runs
from ._narrow import narrow, widen, width_of
from ._ranges import topk_ranges
from ._support import Partition, Pending, SelectedSupport, SharedSupport

# ---- bin packing: algorithm 4 --------------------------------------------------------
#
# The rank that selects in each layer, and each rank's cost: DEFT's bin packing,
# algorithm 4.
#
# Source: Yoon and Oh, ICPP 2023, section 4.3, equations 3 to 5.
# Differences from the paper:
#     - A layer's cost is what selection costs here and not size * log k (equation 3):
#       our top-k reads a layer once, whatever k is. See ``work``. By equation 3 a rank
#       might get few elements that many are chosen of, and read too little, and a layer
#       with k = 1 would cost nothing.
#     - Layers of which all is sent need no selection: they are common to all ranks,
#       cost nothing and belong to nobody.
#
# The greedy rule is ``pack``. What holds of the loads: the heaviest is at most the mean
# + (1 - 1/n) * the largest cost (Graham, 1969). The paper says C(n) <= C_trivial(n) =
# n_g / n * log(k / n) and so a speedup of more than n (equations 7 to 9), without a
# proof, and it is not so of its costs either: of three equal layers one of two ranks
# takes two, C(2) = 2/3 n_g log(k / 3). What is so of them: their mean over ranks is at
# most n_g / n * log2((sum of k, a 1 counted as 2) * largest layer / n_g), about
# C_trivial(n), as log is concave and no layer is larger than n_g / n.


PER_LAYER = 2_000
"""A layer's cost in ``work`` whatever its size: 0.8 us; an element costs 0.41 ns.

Measured with ``topk_ranges`` on one thread of a core with AVX-512,
layers of 1 to 4 M elements of which 0.001 to 0.3 are chosen, not in the cache: the sum
of ``work``'s three terms is within a factor of two of what any of them took, and within
a tenth from 100,000 elements on.
"""
_READ_TWICE = 16_384
"""Elements of a layer that are read twice: to find the k-th one and to list those that
reach it. A longer layer is read once, but a sample of it costs as much as these.
"""
_PER_CHOSEN = 8
"""The cost of ranking and listing an element that may be chosen, in elements read."""


def work(sizes_L: Tensor, k_L: Tensor) -> list[int]:
    """The cost of selecting k of each layer, in elements read.

    0 for layers that are sent whole.
    """
    read_L = sizes_L + sizes_L.clamp(max=_READ_TWICE)
    costs: list[int] = (
        (PER_LAYER + read_L + _PER_CHOSEN * k_L).where(k_L < sizes_L, 0).tolist()
    )
    return costs


def printed_work(sizes_L: Tensor, k_L: Tensor) -> list[float]:
    """Equation 3 as printed: size * log k, so 0 for a layer that sends one element."""
    found: list[float] = (sizes_L * k_L.double().log()).tolist()
    return found


def loads(costs: Sequence[float], bins: Sequence[int], num_bins: int) -> list[float]:
    """Equation 4: the sum of costs in each bin; the largest is C(n)."""
    loads_of_bins = [0.0] * num_bins
    for cost, number in zip(costs, bins, strict=True):
        loads_of_bins[number] += cost
    return loads_of_bins


# ---- layers: algorithm 2 -------------------------------------------------------------
#
# Partitioning of a gradient into layers: DEFT, algorithm 2.
#
# Source: Yoon and Oh, ICPP 2023, section 4.1.
# Differences from the paper: a fraction of no element is no layer, as where a tensor
#     has fewer elements than there are ranks.
#
# Tensors of up to n_g / n elements stay whole, and so cannot always be shared out
# evenly: of ResNet-50 (density 1 %) the busiest of 16 ranks has 1.18 / 16 of the work
# of one that selects alone, of an LSTM's language model of 50 M elements 1.42 / 16.


def two_stage(tensor_sizes: Sequence[int], world: int) -> tuple[int, ...]:
    """Algorithm 2: sizes of the layers of such tensors, in order, without a gap.

    A tensor of more than n_g / n elements becomes n layers of equal size (the first are
    longer by one if need be), any other is a layer. So none has more than ceil(n_g /
    n).

    >>> two_stage([2, 11, 3, 4], world=4)
    (2, 3, 3, 3, 2, 3, 4)
    """
    numel = sum(tensor_sizes)
    layers = list[int]()
    for size in tensor_sizes:
        count = world if size * world > numel else 1
        quotient, remainder = divmod(size, count)
        layers += [quotient + 1] * remainder + [quotient] * (count - remainder)
    return tuple(filter(None, layers))


@lru_cache(maxsize=4096)
def partition_of(tensor_sizes: tuple[int, ...], world: int) -> Partition:
    """The layers of a gradient among so many ranks."""
    return Partition(two_stage(tensor_sizes, world))


# ---- elements of each layer: algorithm 3 ---------------------------------------------
#
# How many elements each layer is to send, by its share of the norms: DEFT, algorithm 3.
#
# Source: Yoon and Oh, ICPP 2023, section 4.2.
# Differences from the paper: its loop, in descending order of norm, hands each layer
#     its share of what is left, at least 1 and at most the layer, and so
#     - overspends by what layers below 1 get, with nothing left: up to L - 1 elements;
#     - loses what a small layer cannot take, where all layers behind it are small too.
#     Here all shares are found at once: k_i = min(size_i, max(1, level * norm_i)) with
#     the one level at which they add up to the budget. Where no bound applies that is
#     what the loop gives. The k are whole numbers: each share is rounded up or down
#     such that all running sums are rounded to the nearest, so every k_i is within 1 of
#     its share, and their sum is exact. A norm that is not finite counts as the largest
#     that is.
#
# So sum(k) = max(budget, L), or less only where every layer with a norm above 0 is sent
# whole. The density therefore has the floor L / n_g, and a gradient of zeros sends one
# element a layer.


_LEAST = 1e-200
"""The least share of the largest norm.

Less counts as 0, as its level would not be finite.
"""


def layer_k(norms_L: Tensor, sizes_L: Tensor, budget: int) -> Tensor:
    """k of each layer (int64, 1 to its size) from norms (float64) and sizes (int64).

    >>> sizes_L = torch.tensor([100, 100, 2, 50])
    >>> norms_L = torch.tensor([6.0, 2.0, 8.0, 0.0]).double()
    >>> layer_k(norms_L, sizes_L, budget=23).tolist()
    [15, 5, 2, 1]
    """
    if not sizes_L.numel():
        return torch.zeros_like(sizes_L)
    budget = max(budget, sizes_L.numel())
    shares_L = shares(_tamed(norms_L), sizes_L, budget)
    return rounded(shares_L)


def printed_layer_k(norms_L: Tensor, sizes_L: Tensor, budget: int) -> Tensor:
    """Algorithm 3 as printed, each k rounded down; takes and returns ``layer_k``'s.

    >>> sizes_L = torch.tensor([100, 100, 2, 50])
    >>> norms_L = torch.tensor([6.0, 2.0, 8.0, 0.0]).double()
    >>> printed_layer_k(norms_L, sizes_L, budget=23).tolist()
    [15, 6, 2, 1]
    """
    k_L = torch.ones_like(sizes_L)
    if sizes_L.numel():
        norms_L = _tamed(norms_L)
    norms = norms_L.tolist()
    order = sorted(range(len(norms)), key=lambda layer: -norms[layer])
    # the smallest first: subtracting large norms would cancel what small ones leave
    sums = [*accumulate(norms[layer] for layer in reversed(order))]
    k_remain = budget
    for layer, norm_remain in zip(order, reversed(sums), strict=True):
        share = 0.0
        if norm_remain > 0:
            share = k_remain * norms[layer] / norm_remain
        size = int(sizes_L[layer])
        k = size if size < share else max(1, int(share))
        k_L[layer] = k
        k_remain -= k
    return k_L


def shares(norms_L: Tensor, sizes_L: Tensor, budget: int) -> Tensor:
    """min(size, max(1, level * norm)), float64, for the level of this ``budget``.

    Norms are finite, and ``budget`` is at least L. What cannot be spent is not.
    """
    floating_L = sizes_L.double()

    def at(level: float) -> Tensor:
        return (norms_L * level).clamp(min=1.0).minimum(floating_L)

    def spent(level: float) -> float:
        return float(at(level).sum())

    # Between two neighbouring levels at which some share stops at a bound, all is
    # linear.
    is_positive_L = norms_L > _LEAST
    norms_P = norms_L[is_positive_L]
    least_P = 1 / norms_P
    most_P = floating_L[is_positive_L] / norms_P
    bends_2P = torch.cat([least_P, most_P]).sort().values
    bends = bends_2P.tolist()
    above = bisect_right(bends, float(budget), key=spent)
    if above == len(bends):
        return at(bends[-1] if bends else 0.0)
    low = bends[max(above - 1, 0)]
    high = bends[above]
    least = spent(low)
    most = spent(high)
    rise = (high - low) * (budget - least) / (most - least)
    return at(low + rise)


def rounded(shares_L: Tensor) -> Tensor:
    """Whole numbers (int64) next to ``shares_L``, with equal running sums, rounded."""
    whole_L = shares_L.floor()
    # Only fractions are summed: a share that is whole keeps its value whatever the
    # rounding.
    fractions_L = shares_L - whole_L
    sums_L = fractions_L.cumsum(0).round()
    ones_L = sums_L.diff(prepend=sums_L.new_zeros(1))
    return (whole_L + ones_L).long()


def _tamed(norms_L: Tensor) -> Tensor:
    """Norms as shares of the largest that is finite; others count as that."""
    is_finite_L = norms_L.isfinite()
    largest = float(norms_L.where(is_finite_L, 0.0).max())
    if not largest:
        return (~is_finite_L).double()
    return (norms_L / largest).where(is_finite_L, 1.0)


# ---- the allocation ------------------------------------------------------------------
#
# Who selects in which layer, as all ranks know it; the way of an index there and back.
#
# The layers that a rank owns, one behind the other in the order in which they lie in
# the gradient, are its part. A *place* counts the elements of all parts, rank 0's
# first: what a rank selects is a range of places of its own, so an index relative to
# the part takes fewer bytes than one relative to the gradient. Layers that are common
# to all ranks are in no part.
#
# Legend: L layers in the order of the gradient, P those of parts in the order of
# places, K indices.


def owners(partition: Partition, k_L: Tensor, world: int, delegate: int) -> Tensor:
    """Algorithm 4: the rank that selects in each layer, int32; ``world`` where all
    ranks send all.

    All ranks send all of a layer whose k is its size, as of one element.
    """
    owners_L = _packed(work(partition.sizes_L, k_L), world, delegate)
    return owners_L.where(k_L < partition.sizes_L, world).int()


def printed_owners(
    partition: Partition, k_L: Tensor, world: int, delegate: int
) -> Tensor:
    """Algorithm 4 as printed: the rank that selects in each layer, int32.

    Layers that are sent whole have an owner too, whose indices travel.
    """
    return _packed(printed_work(partition.sizes_L, k_L), world, delegate)


def _packed(costs: Sequence[float], world: int, delegate: int) -> Tensor:
    """Rank r gets bin (delegate + r) mod W: the first bin has the costliest layer, and
    is another rank's in each step.
    """
    bins = torch.tensor(pack(costs, world), dtype=torch.int32, device="cpu")
    return (bins - delegate) % world


class Rules(NamedTuple):
    """How ranks agree on the elements of each layer, and on the rank that selects."""

    layer_k: Callable[[Tensor, Tensor, int], Tensor]
    """Algorithm 3: k of each layer, from norms, sizes and the budget."""
    owners: Callable[[Partition, Tensor, int, int], Tensor]
    """Algorithm 4, from layers, k, the number of ranks and the delegate."""


ALLOCATIONS = {
    "level": Rules(layer_k, owners),
    "paper": Rules(printed_layer_k, printed_owners),
}


class Allocation:
    """Each rank's layers and elements, as the layers' owners say.

    The same on every rank.
    """

    def __init__(self, partition: Partition, owners_L: Tensor, world: int) -> None:
        self.partition = partition
        num_layers = owners_L.bincount(minlength=world + 1).tolist()
        if len(num_layers) > world + 1:
            raise RanksDiffer(
                f"the delegate gives a layer to rank {len(num_layers) - 1} of {world}; "
                "give every rank the same model, compressor and settings"
            )
        *self.layers, self._common = torch.split(
            owners_L.argsort(stable=True), num_layers
        )
        """The layers that each rank selects in (int64), ascending."""
        self._owned_P = torch.cat(self.layers)
        sizes_P = partition.sizes_L[self._owned_P]
        self._ends_P = sizes_P.cumsum(0)
        self._shifts_P = partition.starts_L[self._owned_P] - self._ends_P + sizes_P
        self.part_sizes = [
            int(partition.sizes_L[layers].sum()) for layers in self.layers
        ]
        """Elements of each rank's part."""
        self.first_places = [0, *accumulate(self.part_sizes)][:-1]
        """The place of each part's first element."""
        self.num_common = int(partition.sizes_L[self._common].sum())
        """Elements that all ranks send."""

    def firsts_of(self, rank: int) -> Tensor:
        """The place in a rank's part at which each of its layers begins (int64)."""
        sizes_P = self.partition.sizes_L[self.layers[rank]]
        return sizes_P.cumsum(0) - sizes_P

    def union(self, me: Member, places_K: Tensor) -> Tensor:
        """The support (int32, ascending): what lies at these places (int32, ascending),
        and all that is common.

        Raises ``RanksDiffer`` for places that this allocation cannot have.
        """
        before_P = torch.searchsorted(places_K, self._ends_P.int())
        counts_P = before_P.diff(prepend=before_P.new_zeros(1))
        is_outside = int(counts_P.sum()) != places_K.numel()
        if is_outside or bool((counts_P < 0).any()):
            raise RanksDiffer(
                "ranks selected elements outside of their parts; give every rank the "
                "same model, compressor and settings"
            )
        counts_L = self.partition.sizes_L.clone()
        counts_L[self._owned_P] = counts_P
        tos_L = counts_L.cumsum(0) - counts_L
        total = places_K.numel() + self.num_common
        support_K = me.scratch("support", total, places_K, torch.int32, varies=True)
        lay_runs(places_K, counts_P, tos_L[self._owned_P], self._shifts_P, support_K)
        common = self._common
        starts_L = self.partition.starts_L
        lay_runs(None, counts_L[common], tos_L[common], starts_L[common], support_K)
        return support_K


# ---- selection: algorithm 5 ----------------------------------------------------------
#
# The largest elements of each of some layers: DEFT, algorithm 5.
#
# Source: Yoon and Oh, ICPP 2023, section 4.4.
# Differences from the paper: exact, with ties to the lowest index, and listed by
# ascending index.


def select_layers(
    me: Member,
    whole_N: Tensor,
    partition: Partition,
    layers_P: Tensor,
    ks_P: Tensor,
    firsts_P: Tensor | None = None,
) -> Tensor:
    """Indices (int32) of the ``ks_P`` largest magnitudes of each layer ``layers_P``.

    All int64, layers in ascending order: so are the indices. A layer's first element
        counts as
    ``firsts_P``, None: as where it lies in the gradient. They lie in a buffer of the
        member.
    """
    count = int(ks_P.sum())
    indices_K = me.scratch("own indices", count, whole_N, torch.int32, varies=True)
    values_K = me.scratch("own values", count, whole_N, whole_N.dtype, varies=True)
    starts_P = partition.starts_L[layers_P]
    stops_P = partition.stops_L[layers_P]
    topk_ranges(whole_N, starts_P, stops_P, ks_P, indices_K, values_K, firsts_P)
    return indices_K


# ---- the exchange --------------------------------------------------------------------


class DeftState(NamedTuple):
    """The layers, and the number of steps that were made (int64)."""

    partition: Partition
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class deft(SharedSupport):
    """Averages about a ``density`` share of elements, the largest of each layer.

    Each rank selects in layers of its own, so no element is selected twice. A rank has
    about 1/W of the work, and more where one layer is large. Every rank takes the norms
    of all layers.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps. Each layer that is not zero sends
            at least one element.
        layers: The number of elements of each layer, in the order of the message: a
            sequence of whole numbers from 0. None (the default): one layer for each
            tensor of the message. Larger layers leave less to balance among ranks.
        allocation: "level" (the default): all layers' shares are found at once, and
            layers are packed by the elements that selection reads. "paper": the loop of
            algorithm 3, which may send up to one element a layer more than asked for,
            and layers packed by size * log k (equation 3).

    >>> from gradwire.exchange.by_name import run_local
    >>> spec = TensorSpec("two layers", 6, shapes=((4,), (2,)))
    >>> grads = [torch.tensor([4.0, 2.0, 1.0, -3.0, 0.0, 1.0])] * 2
    >>> exchange = deft(density=0.5)
    >>> run_local(exchange, grads, [exchange.init(spec, 2)] * 2)[0][0]
    tensor([ 4.,  0.,  0., -3.,  0.,  1.])
    """

    layers: Sequence[int] | None = None
    allocation: str = "level"
    traits: ClassVar[Traits] = replace(
        SharedSupport.traits, whole_tensors=True, exact_size=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("deft allocation", self.allocation, (*ALLOCATIONS,))
        if self.allocation == "paper":
            stated = replace(self.traits, density_range=(0.5, 3.0))
            object.__setattr__(self, "traits", stated)
        if self.layers is None:
            return
        layers = self.layers if isinstance(self.layers, Sequence) else (None,)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in layers):
            accepted = "numbers of elements, one a layer"
            raise invalid("deft layers", self.layers, accepted, "leave them out")
        object.__setattr__(self, "layers", tuple(layers))

    def init(self, spec: TensorSpec, world: int) -> DeftState:
        check_addressable("deft", spec)
        first = torch.zeros(1, dtype=torch.int64, device="cpu")
        return DeftState(self.partition(spec, world), first)

    def partition(self, spec: TensorSpec, world: int) -> Partition:
        """The layers of a message: its tensors, the largest cut among W ranks."""
        sizes = self.layers
        if sizes is None:
            sizes = [prod(shape) for shape in spec.tensor_shapes]
        if sum(sizes) != spec.numel:
            accepted = f"sizes of {spec.numel} elements in all, as {spec.name!r} has"
            raise invalid("deft layers", sizes, accepted, "leave them out")
        return partition_of(tuple(sizes), world)

    def layers_of(self, state: DeftState, numel: int) -> Partition:
        return state.partition

    def select(
        self, me: Member, state: DeftState, pending: Pending
    ) -> Steps[SelectedSupport]:
        partition = state.partition
        whole_N = pending.whole_N
        delegate = int(state.step) % me.world
        width = width_of(me.world + 1)
        num_layers = len(partition.sizes)
        rules = ALLOCATIONS[self.allocation]
        announced = me.scratch("owners", num_layers * width, whole_N, torch.uint8)

        def begin() -> Tensor:
            k_L = rules.layer_k(
                pending.norms_L, partition.sizes_L, self.kept(whole_N.numel())
            )
            if me.rank == delegate:
                owners_L = rules.owners(partition, k_L, me.world, delegate)
                narrow(owners_L, width, announced)
            return k_L

        def accept() -> Allocation:
            owners_L = me.scratch("owner", num_layers, whole_N, torch.int32)
            return Allocation(partition, widen(announced, width, owners_L), me.world)

        def even() -> Tensor:
            """Each layer's k where all have one density, for predictions."""
            sizes_L = partition.sizes_L
            return rules.layer_k(sizes_L.double(), sizes_L, self.kept(whole_N.numel()))

        def usual() -> Allocation:
            owners_L = rules.owners(partition, k_L, me.world, delegate)
            return Allocation(partition, owners_L, me.world)

        k_L = yield me.sized("encode", begin, num_layers, even)
        yield Broadcast(delegate, announced)
        allocation = yield me.sized("encode", accept, num_layers, usual)
        support_K, num_own = yield from _united(me, allocation, k_L, whole_N)
        return SelectedSupport(support_K, num_own, DeftState(partition, state.step + 1))


def _united(
    me: Member, allocation: Allocation, k_L: Tensor, whole_N: Tensor
) -> Steps[tuple[Tensor, int]]:
    """Selects in the own layers and gathers what all selected.

    Returns the support, and how much of it this rank selected, with all that is common.
    """
    width = width_of(max(allocation.part_sizes))
    counts = [int(k_L[layers].sum()) for layers in allocation.layers]
    own_1 = me.scratch("own size", 1, whole_N, torch.int32)
    own_1.fill_(counts[me.rank])
    announced_W = me.scratch("announced sizes", me.world, whole_N, torch.int32)
    yield AllGather(announced_W, own_1)
    announced = me.sizes(
        announced_W, allocation.part_sizes, unit="indices", usual=counts
    )
    sizes = [width * count for count in announced]
    slot = max(sizes)
    total = sum(announced)
    room = me.scratch("own", slot, whole_N, torch.uint8, varies=True)
    gathered = me.scratch(
        "gathered", me.world * slot, whole_N, torch.uint8, varies=True
    )
    places_K = me.scratch("places", total, whole_N, torch.int32, varies=True)

    def choose() -> None:
        layers_P = allocation.layers[me.rank]
        firsts_P = allocation.firsts_of(me.rank)
        partition = allocation.partition
        ks_P = k_L[layers_P]
        indices_K = select_layers(me, whole_N, partition, layers_P, ks_P, firsts_P)
        narrow(indices_K, width, room[: sizes[me.rank]])

    def unite() -> Tensor:
        for rank, part_K in enumerate(torch.split(places_K, announced)):
            start = rank * slot
            stop = start + sizes[rank]
            widen(gathered[start:stop], width, part_K)
            part_K += allocation.first_places[rank]
        return allocation.union(me, places_K)

    yield me.sized("encode", choose, whole_N.numel() // me.world)
    yield AllGather(gathered, room)
    total += allocation.num_common
    support_K = yield me.sized("merge", unite, total, lambda: whole_N.new_empty(total))
    num_own = counts[me.rank] + allocation.num_common
    return support_K, num_own


EXAMPLES = (deft(), deft(density=0.3), deft(density=0.3, allocation="paper"))
