"""Two-stage partitioning of a gradient into layers: DEFT, algorithm 2.

Source: Yoon and Oh, ICPP 2023, section 4.1.
Differences from the paper: a fraction of no element is no layer, as where a tensor has fewer
    elements than there are ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor


def two_stage(tensor_sizes: Sequence[int], world: int) -> tuple[int, ...]:
    """Sizes of the layers that tensors of these sizes make, in order, without a gap.

    A tensor of more than n_g / n elements becomes n layers of equal size, the first ones longer by
    one where it cannot be divided; any other is a layer. So none has more than ceil(n_g / n).

    >>> two_stage([2, 11, 3, 4], world=4)
    (2, 3, 3, 3, 2, 3, 4)
    """
    numel = sum(tensor_sizes)
    layers: list[int] = []
    for size in tensor_sizes:
        if size * world > numel:
            quotient, remainder = divmod(size, world)
            layers += [quotient + 1] * remainder + [quotient] * (world - remainder)
        else:
            layers.append(size)
    return tuple(filter(None, layers))


@dataclass(frozen=True)
class Partition:
    """Where the layers of a gradient lie: flat ranges, one behind the other."""

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
    return Partition(two_stage(tensor_sizes, world))
