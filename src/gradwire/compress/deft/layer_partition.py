"""Partitioning of a gradient into layers: DEFT, algorithm 2, and the cut that is used here.

Source: Yoon and Oh, ICPP 2023, section 4.1.
Differences from the paper:
    - Algorithm 2 (``two_stage``) leaves tensors of up to n_g / n elements whole, and layers as
      coarse cannot be shared out evenly: of an LSTM's language model one of 16 ranks selects from a
      sixth more than the mean of 8 ranks, so that its selection does not get 8 times as fast.
      ``packable`` cuts on where the packing would leave a rank with more than its share.
    - Where each of n layers costs more than it evens out, a tensor is cut into fewer: ResNet-50's
      161 tensors become 236 layers on 16 ranks by algorithm 2, and 166 here.
      Of both models (density 1 % and 0.1 %, elements that are alike) the busiest of n ranks then
      has at most 1.05 / n of the work of one that selects alone, among up to 16 ranks; 1.12 / n up
      to 64; and 1.5 / n up to 256, where layers get so small that what each costs whatever its size
      is much of it.
    - A fraction of no element is no layer, as where a tensor has fewer elements than there are
      ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from .bin_packing import PER_LAYER, loads, pack, work

_ENOUGH = 1.01
"""A cut is fine enough if the busiest rank has at most so many times an equal share."""
_PATIENCE = 8
"""The search ends when so many cuts in turn have made nothing better."""
_MOST_TRIED = 8
"""Tensors of the busiest rank that are tried, the largest: smaller ones change little."""


def two_stage(tensor_sizes: Sequence[int], world: int) -> tuple[int, ...]:
    """Algorithm 2: sizes of the layers of tensors of these sizes, in order, without a gap.

    A tensor of more than n_g / n elements becomes n layers of equal size, any other is a layer. So
    none has more than ceil(n_g / n).

    >>> two_stage([2, 11, 3, 4], world=4)
    (2, 3, 3, 3, 2, 3, 4)
    """
    return _cut(tensor_sizes, _by_algorithm_2(tensor_sizes, world))


def packable(tensor_sizes: Sequence[int], world: int) -> tuple[int, ...]:
    """Sizes of the layers of tensors of these sizes, in order, without a gap.

    Those of algorithm 2, where ranks can be given equal work by them. Otherwise it begins with as
    few layers as none is larger than n_g / n. While the busiest rank has more than its share to do,
    one of the tensors that it selects in is cut into one layer more, the one by which the busiest
    then has least. The best cut met is taken.

    >>> packable([600_000, 600_000, 600_000], world=2)
    (600000, 600000, 300000, 300000)
    """
    share = sum(_costs(tensor_sizes)) / world
    papers = _packed(tensor_sizes, _by_algorithm_2(tensor_sizes, world), world)
    if papers.most <= _ENOUGH * share:
        return two_stage(tensor_sizes, world)
    found = best = _packed(tensor_sizes, _fewest(tensor_sizes, world), world)
    in_vain = 0
    while best.most > _ENOUGH * share and in_vain < _PATIENCE:
        largest = sorted(found.busiest, key=lambda tensor: -tensor_sizes[tensor])
        finer = [
            _packed(tensor_sizes, _one_more(found.counts, tensor), world)
            for tensor in largest[:_MOST_TRIED]
            if tensor_sizes[tensor] > PER_LAYER * found.counts[tensor]
        ]
        if not finer:
            break
        found = min(finer)
        in_vain = 0 if found < best else in_vain + 1
        best = min(best, found)
    return _cut(tensor_sizes, min(best, papers).counts)


def _by_algorithm_2(tensor_sizes: Sequence[int], world: int) -> list[int]:
    """Layers of each tensor."""
    numel = sum(tensor_sizes)
    return [min(size, world if size * world > numel else 1) for size in tensor_sizes]


def _fewest(tensor_sizes: Sequence[int], world: int) -> list[int]:
    """Layers of each tensor, if none may have more than ceil(n_g / n) elements."""
    numel = max(sum(tensor_sizes), 1)
    return [min(size, -(-size * world // numel)) for size in tensor_sizes]


class _Packed(NamedTuple):
    """How tensors, cut into layers, fill the ranks. That is less which leaves the busiest less."""

    most: float
    squares: float
    """Sum of the squares of loads: less where ranks are more alike."""
    counts: list[int]
    """Layers of each tensor."""
    busiest: list[int]
    """The tensors that the busiest rank selects in."""


def _packed(tensor_sizes: Sequence[int], counts: list[int], world: int) -> _Packed:
    costs = _costs(_cut(tensor_sizes, counts))
    ranks = pack(costs, world)
    by_rank = loads(costs, ranks, world)
    most = max(by_rank)
    tensor_of = chain.from_iterable(repeat(i, n) for i, n in enumerate(counts))
    busiest = {i for i, rank in zip(tensor_of, ranks, strict=True) if by_rank[rank] == most}
    return _Packed(most, sum(load * load for load in by_rank), counts, sorted(busiest))


def _one_more(counts: list[int], tensor: int) -> list[int]:
    return [count + (i == tensor) for i, count in enumerate(counts)]


def _costs(layer_sizes: Sequence[int]) -> list[int]:
    """Each layer's cost with one element chosen: the cut may not depend on the gradient."""
    sizes_L = torch.tensor(layer_sizes, dtype=torch.int64, device="cpu")
    return work(sizes_L, torch.ones_like(sizes_L))


def _cut(tensor_sizes: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Sizes of ``counts`` even layers of each tensor; the first are longer by one if need be."""
    layers: list[int] = []
    for size, count in zip(tensor_sizes, counts, strict=True):
        quotient, remainder = divmod(size, max(count, 1))
        layers += [quotient + 1] * remainder + [quotient] * (count - remainder)
    return tuple(filter(None, layers))


@dataclass(frozen=True)
class Partition:
    """The layers of a gradient: flat ranges, one behind the other."""

    sizes: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first element of each layer."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @cached_property
    def sizes_L(self) -> Tensor:
        """int64."""
        return torch.tensor(self.sizes, dtype=torch.int64, device="cpu")

    @cached_property
    def starts_L(self) -> Tensor:
        """int64."""
        return torch.tensor(self.starts, dtype=torch.int64, device="cpu")

    @cached_property
    def stops_L(self) -> Tensor:
        """int64: the element behind the last of each layer."""
        return self.starts_L + self.sizes_L


@lru_cache(maxsize=4096)
def partition_of(tensor_sizes: tuple[int, ...], world: int) -> Partition:
    """The layers of a gradient among so many ranks."""
    return Partition(packable(tensor_sizes, world))
