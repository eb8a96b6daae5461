"""Uncompressed, gradwire gives what DDP gives: step for step, and in each awkward
case.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from tests.each import sampled
from tests.runtime.given import SMALL
from tests.runtime.models import (
    Branches,
    Frozen,
    Mixed,
    OneElement,
    Recomputed,
    Tied,
    Words,
    sparse_rows,
)
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net, adamw, ddp, digest, gradients, loss_of

pytestmark = pytest.mark.multi
Wrapped = tuple[nn.Module, Callable[[], Any]]
"""A model ready for training and its no_sync."""


def by_ddp(model: nn.Module, **settings: Any) -> Wrapped:
    wrapped = ddp(model, **settings)
    return wrapped, wrapped.no_sync


def by_attach(model: nn.Module, **settings: Any) -> Wrapped:
    handle = gw.attach(model, DENSE, options=SMALL)
    return model, handle.no_sync


def by_both(model: nn.Module, **settings: Any) -> Wrapped:
    wrapped = ddp(model, **settings)
    return wrapped, gw.attach(wrapped, DENSE, options=SMALL).no_sync


def left_to_ddp(model: nn.Module, **settings: Any) -> Wrapped:
    wrapped = ddp(model, **settings)
    return wrapped, gw.attach(wrapped, DENSE).no_sync


WAYS = {"module": by_attach, "ddp": by_both, "reducer": left_to_ddp}


def close(
    ours: list[Tensor | None], theirs: list[Tensor | None], way: str = ""
) -> None:
    """Equal within float rounding of the dtype; None and sparse exactly where DDP has
    them.

    What is left to DDP's reducer has DDP's bits.
    """
    for mine, their in zip(ours, theirs, strict=True):
        if their is None or mine is None:
            assert mine is their
            continue
        assert (mine.dtype, mine.layout) == (their.dtype, their.layout)
        assert way != "reducer" or torch.equal(mine, their)
        torch.testing.assert_close(mine.to_dense(), their.to_dense())


# Loops: every one is run under DDP and under gradwire on equal models, and returns
#     gradients.


def steps(rank: int, model: nn.Module, no_sync: Any) -> list[Tensor | None]:
    optimizer = adamw(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return [*gradients(model), *(p.detach() for p in model.parameters())]


def accumulating(rank: int, model: nn.Module, no_sync: Any) -> list[Tensor | None]:
    optimizer = adamw(model.parameters())
    for step in range(6):
        last = step % 3 == 2
        with nullcontext() if last else no_sync():
            (loss_of(model, rank, step) / 3).backward()
        if last:
            kept = gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    return kept


def never_zeroed(rank: int, model: nn.Module, no_sync: Any) -> list[Tensor | None]:
    for step in range(3):
        loss_of(model, rank, step).backward()
    return gradients(model)


def zeroed_in_place(rank: int, model: nn.Module, no_sync: Any) -> list[Tensor | None]:
    optimizer = adamw(model.parameters())
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, rank, step).backward()
        optimizer.step()
    return gradients(model)


def clipped(rank: int, model: nn.Module, no_sync: Any) -> list[Tensor | None]:
    loss_of(model, rank, 0).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return [norm, *gradients(model)]


def some_step_unused(rank: int, model: nn.Module, no_sync: Any) -> list[Tensor | None]:
    optimizer = adamw(model.parameters())
    kept: list[Tensor | None] = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        kept += gradients(model)
        optimizer.step()
    return [*kept, *(p.detach() for p in model.parameters())]


CASES: dict[
    str, tuple[Callable[..., nn.Module], Callable[..., Any], dict[str, Any]]
] = {
    "steps": (Net, steps, {}),
    "gradients as bucket views": (Net, steps, {"gradient_as_bucket_view": True}),
    "static graph": (Net, steps, {"static_graph": True}),
    "accumulation under no_sync": (Net, accumulating, {}),
    "accumulation without zero_grad": (Net, never_zeroed, {}),
    "zero_grad in place": (Net, zeroed_in_place, {}),
    "clip_grad_norm": (Net, clipped, {}),
    "frozen parameters": (Frozen, steps, {}),
    "shared parameters": (Tied, steps, {}),
    "mixed dtypes": (Mixed, steps, {}),
    "one element": (OneElement, steps, {}),
    "activation checkpointing": (Recomputed, steps, {}),
}
# A module alone has none of DDP's settings, and what DDP's reducer makes of a model is
# DDP's.
LEFT_OUT = {
    "module": {"gradients as bucket views", "static graph"},
    "ddp": {"accumulation without zero_grad", "clip_grad_norm"},
    "reducer": {
        name
        for name, (make, loop, _) in CASES.items()
        if make != Net or loop == clipped
    },
}


def by_all_ways(rank: int, world: int, case: str) -> list[str]:
    """Bits of what each way leaves, which is what DDP leaves."""
    make, loop, settings = CASES[case]
    theirs, found = loop(rank, *by_ddp(make(), **settings)), []
    for way, wrap in WAYS.items():
        if case not in LEFT_OUT[way]:
            ours = loop(rank, *wrap(make(), **settings))
            close(ours, theirs, way)
            found.append(digest([t for t in ours if t is not None]))
    return found


@sampled("cases", [*CASES], every=3)
def test_dense_training_has_the_bits_of_ddp(cases: list[str], two: Ranks) -> None:
    for case in cases:
        one, other = two.run(by_all_ways, case)
        assert one == other, case


def test_dense_is_ddp_on_four_ranks(four: Ranks) -> None:
    assert len({str(found) for found in four.run(by_all_ways, "steps")}) == 1


def never(step: int) -> tuple[bool, bool]:
    return True, False


def at_times(step: int) -> tuple[bool, bool]:
    return step % 2 == 0, step % 3 != 1


def unused(rank: int, world: int) -> None:
    """A branch that no rank uses, in some steps or ever: None on every rank, as under
    DDP, so AdamW's weight decay does not touch it either. One that some ranks use
    counts as zero there.
    """

    def on_some(step: int) -> tuple[bool, bool]:
        return (rank == 0, True) if step % 2 else (True, rank != 1)

    for choose in (never, at_times, on_some):
        settings = {"find_unused_parameters": True}
        theirs = some_step_unused(rank, *by_ddp(Branches(choose), **settings))
        for way, wrap in WAYS.items():
            ours = some_step_unused(rank, *wrap(Branches(choose), **settings))
            close(ours, theirs, way)
            assert any(grad is None for grad in ours) == (choose is not on_some)


def test_parameters_that_some_or_no_ranks_use_train_as_under_ddp(two: Ranks) -> None:
    two.run(unused)


def sparse_tables(rank: int, world: int) -> list[str]:
    theirs, found = sparse_rows(rank, *by_ddp(Words())), []
    for wrap in WAYS.values():
        ours = sparse_rows(rank, *wrap(Words()))
        close(ours, theirs)
        found.append(digest(g.to_dense() for g in ours if g is not None))
    return found


def test_sparse_embeddings_train_as_under_ddp(two: Ranks) -> None:
    one, other = two.run(sparse_tables)
    assert one == other


def uneven(rank: int, model: nn.Module) -> list[Tensor | None]:
    optimizer = adamw(model.parameters())
    with model.join():  # type: ignore[operator]
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def joining(rank: int, world: int) -> None:
    theirs = uneven(rank, ddp(Net()))
    model, _ = by_both(Net())
    close(uneven(rank, model), theirs)


def test_uneven_inputs_train_under_ddp_join(two: Ranks) -> None:
    two.run(joining)
