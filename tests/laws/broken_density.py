"""Deliberately wrong densities: made of ``topk``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire.compress.topk import topk
from gradwire_lab.compress.hardthreshold import hardthreshold


class states_nothing(topk):
    """Has a density, and does not say how far it may be missed."""

    traits = replace(topk.traits, density_range=None)


class states_one_without_a_density(hardthreshold):
    """Says how far a density may be missed that nobody can ask for."""

    traits = replace(hardthreshold.traits, density_range=(0.0, 1.0))


class states_it_in_percent(topk):
    """A range that does not hold the density itself."""

    traits = replace(topk.traits, density_range=(90.0, 110.0))


class takes_half(topk):
    """Takes half of what it was asked for, and says it is exact."""

    def kept(self, numel: int) -> int:
        return -(-super().kept(numel) // 2)


class takes_double(topk):
    """Takes twice what it was asked for, and says it is exact."""

    def kept(self, numel: int) -> int:
        return min(numel, 2 * super().kept(numel))


@dataclass(frozen=True, kw_only=True)
class believes_in_normals(hardthreshold):
    """A threshold that is right for standard normal gradients of 1 %, and only for them."""

    density: float = 0.01
    threshold: float = 2.576
    traits = replace(hardthreshold.traits, density_range=(0.5, 2.0))
