"""``gradwire profile --sparsity``: what is asked, who measures it, and its rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import invalid
from ...planning.data.sparsity import SparsityProfile
from ..report.output import progress
from ..report.table import Row
from ._inputs import read_settings

if TYPE_CHECKING:
    from torch import nn

Wanted = Annotated[bool, typer.Option("--sparsity", help="Measure where gradients are zero, too.")]
Batches = Annotated[
    int | None, typer.Option(help="Batches for --sparsity, each as a rank's; else 16.")
]
Sparsifier = Annotated[str | None, typer.Option(help="Measure what this compressor takes, as dgc.")]
SparsifierSettings = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of it, as density=0.05.")
]
SHOWN_RANKS = (2, 8, 32, 128)


@dataclass(frozen=True)
class SparsityAsked:
    """The options of ``gradwire profile`` that are about sparsity."""

    wanted: bool
    batches: int | None = None
    sparsifier: str | None = None
    settings: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls, wanted: bool, batches: int | None, sparsifier: str | None, given: list[str] | None
    ) -> SparsityAsked:
        """Raises ``InvalidSetting`` for an option that is of no use without another one."""
        for option, value in (("--batches", batches), ("--sparsifier", sparsifier)):
            if value is not None and not wanted:
                raise invalid(option, value, "given with --sparsity", "write --sparsity")
        if given and sparsifier is None:
            accepted = "a setting of the sparsifier"
            raise invalid("--set", given[0], accepted, "write --sparsifier dgc")
        return cls(wanted, batches, sparsifier, read_settings(given or ()))

    def refuse(self, name: str) -> None:
        """Refuses --sparsity for a model of the catalogue, which nobody can run."""
        if self.wanted:
            accepted = "given with FILE.py:function"
            raise invalid("--sparsity", name, accepted, "write your model's file")

    def measure(self, model: nn.Module, step: Callable[[], object]) -> SparsityProfile:
        """Measures among torchrun's ranks or in this process with batches as ranks."""
        from ...planning.measure.sparsity import (
            NUM_GRADIENTS,
            measure_group_sparsity,
            measure_sparsity,
        )

        total = NUM_GRADIENTS if self.batches is None else self.batches
        is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        with progress("looking for zeros", total=total) as advance:
            return (measure_group_sparsity if is_launched else measure_sparsity)(
                model,
                step,
                num_gradients=self.batches,
                compressor=self.sparsifier,
                settings=self.settings,
                advance=advance,
            )


def rows(sparsity: SparsityProfile) -> list[Row]:
    """A row a sparse tensor; beyond ``measured_ranks`` densification is extrapolated."""
    found: list[Row] = []
    for tensor in sparsity.tensors:
        units = tensor.units
        row: Row = {
            "name": tensor.name,
            "unit": "elements" if units.width == 1 else f"rows of {units.width}",
            "fraction_dense": units.density,
            "fraction_overlap": units.overlap_mean,
            "fraction_overlap_spread": units.overlap_spread,
        }
        for ranks in SHOWN_RANKS:
            row[f"denser_among_{ranks}"] = units.gamma(ranks)
        row["skew_8"], row["skew_128"] = units.skew(8), units.skew(128)
        row["measured_ranks"] = sparsity.num_gradients
        found.append(row)
    return found
