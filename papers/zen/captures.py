"""Captures: the non-zero elements of many ranks' real gradients at one moment of
training.

One process has the parameters of all ranks after a few steps. It takes the batches of
up to 128 ranks one after another, and so computes the gradients that they would hold at
that step. A capture is kept beside the figures, so that all of them are about the same
gradients.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwire.contract import Compressor
from gradwire.contract.registry import load
from gradwire.contract.spec import spec_of
from gradwire.planning.data.sparsity import Indices
from gradwire_bench.workloads.task import TrainingTask

from ..frame import Ask, Report
from ..whole import write_whole
from ..workloads import movielens
from ..workloads.applications import movielens_deepfm, text_lstm, text_transformer

WARM_UP = 5
"""The steps of one rank before the capture."""
DENSITY = 0.05
"""The density of DGC: section 5.1."""


@dataclass(frozen=True)
class Capture:
    """One tensor's non-zero units on every rank; a unit is ``width`` adjacent
    elements.
    """

    name: str
    about: str
    """The model, the data and the tensor in words."""
    num_units: int
    width: int
    units: tuple[Indices, ...]
    """The numbers of each rank's non-zero units, ascending, int32."""

    @property
    def numel(self) -> int:
        return self.num_units * self.width

    @property
    def density(self) -> float:
        """The density of a rank's gradient, a mean over ranks."""
        return sum(map(len, self.units)) / (len(self.units) * self.num_units)

    def elements(self, num_ranks: int | None = None) -> list[Tensor]:
        """The indices of the elements in each rank's units, for the first ``num_ranks``
        ranks.
        """
        within_w = torch.arange(self.width, dtype=torch.int32)
        units = map(torch.from_numpy, self.units[:num_ranks])
        return [(one[:, None] * self.width + within_w).flatten() for one in units]

    def save(self, path: Path) -> None:
        """Writes it in one step: an ``.npz`` with ``num_units``, ``width``, ``about``,
        ``name`` and each rank's ``units_<rank>``.
        """
        fields: dict[str, Any] = {
            f"units_{rank}": one for rank, one in enumerate(self.units)
        }
        content = io.BytesIO()
        np.savez(
            content,
            name=np.array(self.name),
            about=np.array(self.about),
            num_units=np.array(self.num_units),
            width=np.array(self.width),
            **fields,
        )
        write_whole(path, content.getvalue())

    @classmethod
    def read(cls, path: Path) -> Capture:
        """The capture in a file that ``save`` wrote."""
        with np.load(path) as held:
            ranks = sum(key.startswith("units_") for key in held.files)
            return cls(
                name=str(held["name"]),
                about=str(held["about"]),
                num_units=int(held["num_units"]),
                width=int(held["width"]),
                units=tuple(held[f"units_{rank}"] for rank in range(ranks)),
            )


@dataclass(frozen=True)
class Source:
    """A model whose gradients are captured."""

    name: str
    make: Callable[[], TrainingTask]
    parameter: str | None = None
    """The embedding whose gradient is captured; None for DGC's selection from all
    gradients.
    """
    lacking: Callable[[], str | None] = lambda: None
    """A function that says why its data are not here and how to get them; None if they
    are.
    """


SOURCES = {
    one.name: one
    for one in (
        Source(
            "lstm",
            partial(text_lstm, vocabulary=20_000, hidden=64, batch=20, context=35),
            "embedding.weight",
        ),
        Source(
            "deepfm",
            partial(movielens_deepfm, embedding=32),
            "table.weight",
            lacking=movielens.missing,
        ),
        Source(
            "transformer",
            partial(text_transformer, vocabulary=5_000, width=160, num_layers=3),
        ),
        Source(
            "lstm, one sentence",
            partial(text_lstm, vocabulary=20_000, hidden=64, batch=1, context=20),
            "embedding.weight",
        ),
    )
}
"""ZEN's workloads in sizes for a small machine: an LSTM and a DeepFM, whose embeddings'
gradients are sparse by themselves, a transformer with DGC of 5 %, and the case of
section 2.4 in which SparCML is the best, as gradients hardly overlap.
"""

MODELS = ("lstm", "deepfm", "transformer")


def lacking(name: str) -> str | None:
    """The reason why a model cannot be captured here, with a remedy; None if it can."""
    return SOURCES[name].lacking()


def present(models: Sequence[str]) -> tuple[str, ...]:
    """The models whose data this machine has."""
    return tuple(name for name in models if lacking(name) is None)


def stem(name: str) -> str:
    """A model's name in the names of files."""
    return name.replace(", ", "-").replace(" ", "-")


def captured(ask: Ask, name: str, num_ranks: int) -> Capture:
    """The capture of a model with at least ``num_ranks`` ranks.

    It is read from ``ask.folder`` if it was kept there, else it is made, and kept if
    there is such a folder.
    """
    path = None if ask.folder is None else ask.folder / f"capture-{stem(name)}.npz"
    if path is not None and path.exists():
        kept = Capture.read(path)
        if len(kept.units) >= num_ranks:
            return kept
    found = capture(SOURCES[name], num_ranks, ask.report)
    if path is not None:
        found.save(path)
    return found


def capture(source: Source, num_ranks: int, report: Report) -> Capture:
    """Trains ``WARM_UP`` steps and takes the gradients of ``num_ranks`` batches."""
    task = source.make()
    torch.manual_seed(task.seed)
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters())
    for step in range(WARM_UP):
        _backward(task, model, step, 0, 1)
        optimizer.step()
    units = []
    width = 1
    num_units = 0
    for rank in range(num_ranks):
        report(rank / num_ranks, f"{source.name}, gradient {rank + 1} of {num_ranks}")
        _backward(task, model, WARM_UP, rank, num_ranks)
        found, width, num_units = _units(model, source.parameter)
        units.append(found.numpy().astype(np.int32))
    what = (
        source.parameter or f"all gradients, of which DGC selects {100 * DENSITY:g} %"
    )
    return Capture(
        source.name, f"{task.description}; {what}", num_units, width, tuple(units)
    )


def _backward(
    task: TrainingTask, model: nn.Module, step: int, rank: int, world: int
) -> None:
    model.zero_grad()
    loss = task.loss(model, *task.batch(step, rank, world))
    loss.backward()  # type: ignore[no-untyped-call]


def _units(model: nn.Module, parameter: str | None) -> tuple[Tensor, int, int]:
    """The ascending numbers of the non-zero units, the elements of a unit, and the
    number of all units.
    """
    if parameter is None:
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        grad_N = torch.cat(parts)
        codec: Compressor = load("compress", "dgc")(density=DENSITY)
        payload, _ = codec.encode(codec.init(spec_of(grad_N)), grad_N)
        return codec.entries(payload)[0], 1, grad_N.numel()
    grad = model.get_parameter(parameter).grad
    assert grad is not None
    num_units, width = grad.shape
    return grad.ne(0).any(1).nonzero().squeeze(1).int(), width, num_units
