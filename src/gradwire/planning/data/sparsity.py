"""SparsityProfile: how sparse gradients are, where, and how they overlap, as data.

Source: ZEN (OSDI 2025), section 2.1: definitions 1 to 5, figures 2 and 3.
Differences from the paper: *units* of ``width`` adjacent elements are counted: 1 as in
    the paper, or the length of an embedding's row. A unit is non-zero if any of its
    elements is. The densification ratio of n ranks is its exact mean over all subsets
    of n measured gradients, where the paper takes one subset. For more ranks it is
    extrapolated, and marked so. It is a power law in n, up to all units being non-zero.
    Its exponent falls with every doubling as it fell with the last measured one. On
    drawn Zipf indices (exponents 0.8 to 1.2) 16 measured gradients give that of 128
    within 25 %, and too large.

Index sets are 1-D arrays of unit numbers, ascending and without duplicates: one a
gradient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import log2
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from ...kernels.sparse.entries import MOST_WIDTH
from .stored import (
    MOST_ELEMENTS,
    MOST_RANKS,
    Frozen,
    NonNegative,
    Stored,
    check_once,
)

Indices = npt.NDArray[np.integer[Any]]
DOUBLINGS = (2, 4, 8, 16, 32, 64, 128)
"""Numbers of ranks, and of partitions, that ratios are kept for."""

HEATMAP_PARTS = 8
"""Partitions that ``shares`` are kept of: the rows of figure 3a."""

BLOCK = 256
"""Elements of OmniReduce's blocks, which hold whole units: one at least."""

_SLACK = 1e-6
"""Relative: means of ratios are sums of many floats."""

Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Ranks = Annotated[int, Field(ge=2, le=MOST_RANKS)]


class Densification(Frozen):
    """The densification ratio among ``ranks`` ranks."""

    ranks: Ranks
    ratio: NonNegative
    extrapolated: bool = False
    """Whether fewer gradients were measured than there are ranks."""


class Skewness(Frozen):
    """The skewness ratio of ``parts`` even partitions."""

    parts: Ranks
    ratio: NonNegative


class RangeImbalance(Frozen):
    """Definition 8's imbalances where each rank serves one of as many partitions.

    ``push`` is of what all of them have, ``pull`` of what their sum has: that is less
    skewed, as ranks share most where they have most.
    """

    ranks: Ranks
    push: NonNegative
    pull: NonNegative


class UnitSparsity(Frozen):
    """The sparsity of one gradient in units of ``width`` elements.

    Raises ``ValueError`` (pydantic's) for figures that no gradients have, by their
    names.
    """

    width: Annotated[int, Field(ge=1, le=MOST_WIDTH)]
    num_units: Annotated[int, Field(ge=1, le=MOST_ELEMENTS)]
    density: Fraction
    """The mean density of the gradients measured."""
    overlaps: tuple[Fraction, ...] = ()
    """Overlap ratios of pairs of gradients: figure 2a is their distribution."""
    densification: tuple[Densification, ...] = ()
    """Densification ratios, ascending in ranks: figure 2b."""
    skewness: tuple[Skewness, ...] = ()
    """Skewness ratios, ascending in parts: figure 3b."""
    imbalances: tuple[RangeImbalance, ...] = ()
    """Imbalances, ascending in ranks, up to the number of gradients measured."""
    shares: tuple[Fraction, ...] = ()
    """Each of ``HEATMAP_PARTS`` partitions' share of the non-zero units: figure 3a."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        """Refuses entries that do not ascend.

        Values between two entries are worked out from both.
        """
        numbers = {
            "densification ratios by ranks": [at.ranks for at in self.densification],
            "skewness ratios by parts": [at.parts for at in self.skewness],
            "imbalances by ranks": [at.ranks for at in self.imbalances],
        }
        for what, kept in numbers.items():
            if any(before >= after for before, after in pairwise(kept)):
                raise ValueError(
                    f"{what} are of {kept}, and are listed once each, ascending"
                )
        return self

    @model_validator(mode="after")
    def _possible(self) -> Self:
        last = 1.0
        for entry in self.densification:
            what = f"densification ratio of {entry.ranks} ranks"
            if entry.ratio > entry.ranks * (1 + _SLACK):
                raise ValueError(
                    f"{what} is {entry.ratio:g}, and at most {entry.ranks} is possible"
                )
            if entry.ratio < last * (1 - _SLACK):
                raise ValueError(
                    f"{what} is {entry.ratio:g}, below the {last:g} of fewer ranks"
                )
            if entry.ratio * self.density > 1 + _SLACK:
                raise ValueError(
                    f"{what} is {entry.ratio:g}, which makes a density of "
                    f"{self.density:g} more than all units"
                )
            last = entry.ratio
        for cut in self.skewness:
            most = self.num_units / max(1, self.num_units // cut.parts)
            if not 1 - _SLACK <= cut.ratio <= most * (1 + _SLACK):
                raise ValueError(
                    f"skewness ratio of {cut.parts} parts is {cut.ratio:g}, and 1 to "
                    f"{most:g} is possible"
                )
        for at in self.imbalances:
            least = min(at.push, at.pull)
            most = max(at.push, at.pull)
            if least < 1 - _SLACK or most > at.ranks * (1 + _SLACK):
                raise ValueError(
                    f"imbalances among {at.ranks} ranks are {at.push:g} and "
                    f"{at.pull:g}, and 1 to {at.ranks} is possible"
                )
        return self

    def gamma(self, num_ranks: int) -> float:
        """The densification ratio among any number of ranks: 1 for one, a power of the
        ranks between two that are kept, and the last one's growth beyond them.

        Without any kept: that of gradients that share nothing.
        """
        known = [
            (1, 1.0),
            *((entry.ranks, entry.ratio) for entry in self.densification),
        ]
        if len(known) == 1:
            return min(float(num_ranks), self._most)
        return max(1.0, min(between(known, num_ranks), float(num_ranks), self._most))

    def on_hosts(self, num_ranks: int, *, is_selected: bool) -> UnitSparsity:
        """The sparsity of a rank's share of its host's sum, of ``num_ranks`` a host.

        A unit of the sum is non-zero if one of the host's ranks has it. If a sparsifier
        selects from the sum (``is_selected``), hosts send as much as ranks would. Hosts
        are then taken to overlap as ranks do, and shares to be skewed as whole
        gradients are. The share of the rank that sends most has a unit at least.
        """
        count = 1 if is_selected else num_ranks
        factor = self.gamma(count)
        num_units = -(-self.num_units // num_ranks)
        grown = [
            Densification.model_construct(
                ranks=hosts,
                ratio=self.gamma(hosts * count) / factor,
                extrapolated=self.is_extrapolated(hosts * count),
            )
            for hosts in (DOUBLINGS if self.densification else ())
        ]
        return self.model_copy(
            update={
                "num_units": num_units,
                "density": min(
                    1.0,
                    max(self.density * factor, 1 / num_units if self.density else 0),
                ),
                "densification": tuple(grown),
            }
        )

    @property
    def _most(self) -> float:
        return 1 / self.density if self.density else 1.0

    def is_extrapolated(self, num_ranks: int) -> bool:
        """Whether ``gamma(num_ranks)`` rests on more ranks than were measured."""
        measured = [
            entry.ranks for entry in self.densification if not entry.extrapolated
        ]
        return num_ranks > max(measured, default=1)


def between(known: Sequence[tuple[int, float]], at: int) -> float:
    """The value on the straight line between two neighbours, both axes logarithmic."""
    numbers = [number for number, _ in known]
    after = min(bisect_left(numbers, at), len(known) - 1)
    (low, low_y) = known[max(after, 1) - 1]
    (high, high_y) = known[max(after, 1)]
    return float(low_y * (high_y / low_y) ** (log2(at / low) / log2(high / low)))


class TensorSparsity(Frozen):
    """One tensor's gradient: in its units, and in blocks, as OmniReduce sends them."""

    name: Annotated[str, Field(min_length=1)]
    units: UnitSparsity
    blocks: UnitSparsity
    is_rows: bool = False
    """Its gradients come as rows, which not all schemes carry.

    ``nn.Embedding(sparse=True)`` has such gradients.
    """


class Handling(Frozen):
    """The cost of a sparse gradient on the host, beside the network.

    ``scan_s`` is the time to see whether one element is zero. ``entry_s`` is the time
    to move one non-zero element once: into a payload, into its partition, or into a
    sum.
    """

    scan_s: NonNegative = 0.0
    entry_s: NonNegative = 0.0


class SparsityProfile(Stored):
    """The measured sparsity of a model's gradients.

    Tensors that are dense are left out.

    Args:
        source: How the figures were got: device, date and data of the measurement.
        num_gradients: The number of measured batches over all ranks, from 1 to 65536.
            Each stands for a rank.
        compressor: The name of the sparsifier whose selections were measured, but of
            tensors that come as rows. None (the default): the gradients themselves were
            measured.
        settings: The sparsifier's settings by name. Default: none.
        handling: The seconds that sparse gradients take on the host. Default: 0.
        tensors: The tensors whose gradients are sparse. Default: none.

    Raises:
        InvalidSetting: ``load`` and ``parse`` raise it for a file with an impossible
            figure. The message names the figure.
    """

    WRITTEN_BY: ClassVar[str] = "gradwire sparsity"

    source: Annotated[str, Field(min_length=1)]
    num_gradients: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    compressor: str | None = None
    settings: dict[
        str, bool | int | Annotated[float, Field(allow_inf_nan=False)] | str
    ] = Field(default_factory=dict)
    handling: Handling = Handling()
    tensors: tuple[TensorSparsity, ...] = ()

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        check_once("tensor", (tensor.name for tensor in self.tensors))
        return self
