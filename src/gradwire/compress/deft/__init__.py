"""deft: the largest elements of each layer, as many as its norm asks for, each layer by one rank.

Source: Yoon and Oh, ICPP 2023, "DEFT: exploiting gradient norm difference between model layers for
    scalable gradient sparsification", algorithms 1 to 5, each in a file: ``support``,
    ``partition``, ``layer_k``, ``bin_packing`` (with ``allocation``), ``layerwise``.
Differences from the paper (what one algorithm does otherwise stands in its file):
    - The layers are those of one message: n_g is its number of elements, and norms are compared
      within it. Fused into one message, a model is treated as in the paper.
    - Tensors are cut on beyond algorithm 2, where ranks could not be given equal work otherwise,
      and layers are weighed by what our selection costs. See ``partition``, ``bin_packing``.
    - A layer of which all is sent (k is its size, as of one element) is common to all ranks: no
      rank selects in it and none of its indices travels. As k comes from each rank's own norms,
      ranks might differ in which these are: the delegate alone says so, with the allocation.
    - The delegate sends each layer's owner and not lists of layers. An index travels relative to
      the part of the rank that selected it, in the fewest whole bytes (int64 in published code).
    - Among one rank nothing is selected.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a small GPT
    end 37 to 40 % behind dense with it, as an element waits for 100 steps (docs/measured.md).
Density: a layer's k is that of its owner's norms. The sum of any one rank's k is exactly
    max(round(density * N), L), but for layers of zeros, so the floor is L / N; what arrives differs
    from that as norms do between ranks. With gradients that are half alike, layers 100-fold apart
    and error feedback: by up to 4 % at density 0.02 and 6 % at 0.1, among 2 to 16 ranks. At worst,
    if the gradient of every rank were nothing but the layers that it owns, W times as much.
Wire: a broadcast of L numbers of 1 byte (2 from 256 ranks on) by the delegate; 4 bytes to
    each other rank, how many indices follow; the indices, (W-1) * b * (the most that a rank
    selected), b the fewest whole bytes (1 to 4) for the largest part; an all-reduce of the K values
    of the union and one that tells whether all is finite, in the working dtype ->
    2(W-1)/W * 4 * (K + 1) bytes a rank (8 for float64).
State: the partition, which follows from the spec; step, int64, the same on all ranks: rank step mod
    W is the delegate.
Contributed: this rank's values at the union of what all ranks selected.

Norms are of all layers, as each is weighed against all others: that pass does not get shorter with
more ranks. But it is the pass that adds gradient and residual up, which is needed anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...contract import Member, Traits
from ...contract.spec import TensorSpec
from ...contract.verbs import AllGather, Broadcast, Steps
from ...errors import invalid
from .._coo import check_addressable
from .._narrow import narrow, widen, width_of
from .allocation import Allocation, owners
from .layer_k import layer_k
from .layer_partition import Partition, partition_of
from .layerwise import select_layers
from .support import Pending, SelectedSupport, SharedSupport

_COUNT_BYTES = torch.int32.itemsize


class DeftState(NamedTuple):
    """The layers, and the number of steps that were made (int64)."""

    partition: Partition
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class deft(SharedSupport):
    """Averages about a ``density`` share of elements: of each layer those that are largest there.

    ``layers`` are the sizes of the tensors that lie in a message; None: those of the model. Each
    rank selects in layers of its own, so what ranks select never overlaps. That is about 1/W of the
    work among up to 64 ranks, and less evenly shared among more; norms are taken of all layers.

    >>> from gradwire.exchange.by_name import run_local
    >>> spec = TensorSpec("two layers", 6, shapes=((4,), (2,)))
    >>> grads = [torch.tensor([4.0, 2.0, 1.0, -3.0, 0.0, 1.0])] * 2
    >>> exchange = deft(density=0.5)
    >>> run_local(exchange, grads, [exchange.init(spec, 2)] * 2)[0][0]
    tensor([ 4.,  0.,  0., -3.,  0.,  1.])
    """

    layers: Sequence[int] | None = None
    traits: ClassVar[Traits] = replace(SharedSupport.traits, whole_tensors=True, exact_size=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is None:
            return
        given = self.layers if isinstance(self.layers, Sequence) else (None,)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in given):
            accepted = "numbers of elements, one a layer"
            raise invalid("deft layers", self.layers, accepted, "leave them out")
        object.__setattr__(self, "layers", tuple(given))

    def init(self, spec: TensorSpec, world: int) -> DeftState:
        check_addressable("deft", spec)
        first = torch.zeros(1, dtype=torch.int64, device="cpu")
        return DeftState(self.partition(spec, world), first)

    def partition(self, spec: TensorSpec, world: int) -> Partition:
        """The layers of a message: its tensors, cut so that W ranks can share them out evenly."""
        sizes = self.layers
        if sizes is None:
            sizes = [prod(shape) for shape in spec.tensor_shapes]
        if sum(sizes) != spec.numel:
            accepted = f"sizes of {spec.numel} elements in all, as {spec.name!r} has"
            raise invalid("deft layers", sizes, accepted, "leave them out")
        return partition_of(tuple(sizes), world)

    def layers_of(self, state: DeftState, numel: int) -> Partition:
        return state.partition

    def select(self, me: Member, state: DeftState, pending: Pending) -> Steps[SelectedSupport]:
        partition, whole_N = state.partition, pending.whole_N
        delegate, width = int(state.step) % me.world, width_of(me.world + 1)
        num_layers = len(partition.sizes)
        told = me.scratch("owners", num_layers * width, whole_N, torch.uint8)

        def begin() -> Tensor:
            k_L = layer_k(pending.norms_L, partition.sizes_L, self.kept(whole_N.numel()))
            if me.rank == delegate:
                narrow(owners(partition, k_L, me.world, delegate), width, told)
            return k_L

        def accept() -> Allocation:
            owners_L = me.scratch("owner", num_layers, whole_N, torch.int32)
            return Allocation(partition, widen(told, width, owners_L), me.world)

        def usual() -> Allocation:
            return Allocation(partition, owners(partition, k_L, me.world, delegate), me.world)

        k_L = yield me.sized(
            "encode", begin, num_layers, lambda: self._even(partition, whole_N.numel())
        )
        yield Broadcast(delegate, told)
        allocation = yield me.sized("encode", accept, num_layers, usual)
        support_K, num_own = yield from _united(me, allocation, k_L, whole_N)
        return SelectedSupport(support_K, num_own, DeftState(partition, state.step + 1))

    def _even(self, partition: Partition, numel: int) -> Tensor:
        """Each layer's k where all are of one density: what predictions go on with."""
        return layer_k(partition.sizes_L.double(), partition.sizes_L, self.kept(numel))


def _counts(allocation: Allocation, k_L: Tensor, world: int) -> list[int]:
    """How many elements each rank selects in its part, if these are its layers' k."""
    return [int(k_L[allocation.layers_of(rank)].sum()) for rank in range(world)]


def _united(
    me: Member, allocation: Allocation, k_L: Tensor, whole_N: Tensor
) -> Steps[tuple[Tensor, int]]:
    """Selects in the own layers and gathers what all selected.

    Returns the support, and how much of it this rank selected, with all that is common.
    """
    width = width_of(max(allocation.part_sizes))
    counts = _counts(allocation, k_L, me.world)
    own_1 = me.scratch("own size", 1, whole_N, torch.int32).fill_(counts[me.rank])
    told_W = me.scratch("told sizes", me.world, whole_N, torch.int32)
    yield AllGather(told_W, own_1)
    told = me.sizes(told_W, allocation.part_sizes, unit="indices", usual=counts)
    sizes = [width * count for count in told]
    own = me.scratch("own", max(sizes), whole_N, torch.uint8, varies=True)
    gathered = me.scratch("gathered", me.world * max(sizes), whole_N, torch.uint8, varies=True)
    places_K = me.scratch("places", sum(sizes) // width, whole_N, torch.int32, varies=True)

    def choose() -> None:
        layers_P = allocation.layers_of(me.rank)
        firsts_P = allocation.firsts_of(me.rank)
        indices_K = select_layers(
            me, whole_N, allocation.partition, layers_P, k_L[layers_P], firsts_P
        )
        narrow(indices_K, width, own[: sizes[me.rank]])

    def unite() -> Tensor:
        ranges = torch.split(places_K, [size // width for size in sizes])
        for rank, part_K in enumerate(ranges):
            start = rank * max(sizes)
            widen(gathered[start : start + sizes[rank]], width, part_K)
            part_K += allocation.first_places[rank]
        return allocation.union(me, places_K)

    yield me.sized("encode", choose, whole_N.numel() // me.world)
    yield AllGather(gathered, own)
    total = places_K.numel() + allocation.num_common
    support_K = yield me.sized("merge", unite, total, lambda: whole_N.new_empty(total))
    return support_K, counts[me.rank] + allocation.num_common


EXAMPLES = (deft(), deft(density=0.3))
