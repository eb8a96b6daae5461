"""Figure 12 of SSFusion in small: groups of tensors, kept trainings, and verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradwire.compress.none import none
from gradwire.compress.topk import topk
from gradwire.contract import Member
from gradwire.contract.registry import load
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.by_name import exchange_for, run_local
from gradwire.exchange.error_feedback import residuals
from gradwire.exchange.local import drive
from gradwire_bench.workloads.task import Batch, TrainingTask, class_loss, random_of
from papers.frame import Ask
from papers.ssfusion import training
from papers.ssfusion.convergence import draw12, figure12
from papers.ssfusion.grouped import Grouped, GroupedState
from papers.ssfusion.setting import LOCAL, LOCAL_RANKS
from papers.ssfusion.training import (
    DENSE,
    FOLDER,
    SCHEMES,
    Run,
    Scheme,
    Trained,
    enlarged,
    exchange_of,
    grouped,
    history,
)

pytestmark = pytest.mark.slow

SHAPES = ((3, 4), (5,), (2, 2, 2))
SPEC = TensorSpec("gradient", 25, shapes=SHAPES)


def grads(world: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(25, generator=draw) for _ in range(world)]


def small(seed: int = 0) -> TrainingTask:
    def batch(step: int, rank: int, world: int) -> Batch:
        random = random_of(seed, step, rank, world)
        return torch.randn(8, 12, generator=random), torch.randint(12, (8,), generator=random)

    return TrainingTask(
        name="small",
        description="two linear layers on noise",
        make_model=lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12)),
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=batch,
        loss=class_loss,
        score=lambda model: sum(p.abs().sum().item() for p in model.parameters()),
        metric="size",
        seed=seed,
    )


MODEL = Trained("small", small, 6, 3, "resnet152", (), less_is_better=True)


# Groups


def driven(made: Grouped, given: list[Tensor]) -> tuple[list[Tensor], list[GroupedState]]:
    """The mean on each rank and the states after one step, as ``Replicas`` makes it."""
    world = len(given)
    means = [torch.empty_like(one) for one in given]
    states = [made.init(SPEC, world) for _ in given]
    outcome = drive(
        [
            made.synchronise(Member(rank, world), states[rank], given[rank], means[rank])
            for rank in range(world)
        ],
        seed=0,
    )
    return means, outcome.results


def test_groups_give_what_their_exchanges_give() -> None:
    """Tensors 2 and 0 share a message, tensor 1 is by itself; and nothing is lost."""
    sparse, plain = exchange_for(topk(density=0.2)), exchange_for(none())
    given = grads(3)
    means, states = driven(Grouped((((2, 0), sparse), ((1,), plain))), given)
    both = [torch.cat([one[17:25], one[0:12]]) for one in given]
    spec = TensorSpec("group", 20, shapes=(SHAPES[2], SHAPES[0]))
    expected = run_local(sparse, both, [sparse.init(spec, 3) for _ in range(3)])
    for mean_N, state, (group_M, _, inner) in zip(means, states, expected, strict=True):
        assert torch.equal(torch.cat([mean_N[17:25], mean_N[0:12]]), group_M)
        assert torch.allclose(mean_N[12:17], torch.stack(given).mean(0)[12:17])
        (kept_M,) = residuals(state).values()
        assert torch.equal(kept_M, inner.residual_N)
    left_N = torch.stack(given).sum(0) - 3 * means[0]
    kept_M = torch.stack([next(iter(residuals(state).values())) for state in states]).sum(0)
    assert torch.allclose(torch.cat([left_N[17:25], left_N[0:12]]), kept_M, atol=1e-6)


@pytest.mark.parametrize("planner", ["ssfusion", "omgs", "cupcake"])
def test_a_plan_becomes_groups_of_all_tensors(planner: str) -> None:
    profile = enlarged(small(), "resnet152")
    plan = load("planner", planner)(profile, LOCAL.cluster(LOCAL_RANKS))
    made = grouped(plan, profile)
    places = [place for own, _ in made.parts for place in own]
    assert sorted(places) == [0, 1, 2, 3]
    assert len(made.parts) == len(plan.messages)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda one: one.name)
def test_every_scheme_is_an_exchange_that_trains(scheme: Scheme) -> None:
    run = Run(MODEL, scheme, seed=0, quick=True)
    found = history(Ask(True, lambda done, what: None, {}), run)
    assert len(found.losses) == 3
    assert (found.actual[-1] == 1) == (scheme.name == DENSE)
    assert exchange_of(scheme, small(), "resnet152")[1] >= 1


# The figure


def ask(folder: Path | None) -> Ask:
    return Ask(True, lambda done, what: None, {}, folder)


def test_trainings_are_kept_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = figure12(ask(tmp_path), [MODEL])
    assert [row["name"] for row in found.rows] == [scheme.name for scheme in SCHEMES]
    assert len(list((tmp_path / FOLDER).iterdir())) == len(SCHEMES)
    assert found.complete

    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(training, "train", refuse)
    assert figure12(ask(tmp_path), [MODEL]) == found
    drawn = draw12(found.rows, tmp_path / "x.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")


# Verdicts, on rows that are made up
