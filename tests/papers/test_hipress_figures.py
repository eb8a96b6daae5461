"""HiPress's figures in small: their shapes, systems, readings, and verdicts that can fail."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradwire.planning import catalogue
from gradwire.planning.check import check
from gradwire_bench.workloads.task import TrainingTask, class_loss
from papers.frame import Findings
from papers.hipress import accuracy, convergence, sizes, speed, throughput, varied
from papers.hipress.printed import BYTEPS, BYTEPS_ONEBIT, PS_ONEBIT, RING
from papers.hipress.setting import EC2
from papers.hipress.systems import PARTITION_BYTES, SYSTEMS, TRAINED
from tests.papers.figures import ask, law_of_figures

pytestmark = pytest.mark.slow


def noise(*, seed: int = 0) -> TrainingTask:
    def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(4, 6, generator=draw), torch.randint(3, (4,), generator=draw)

    return TrainingTask(
        name="noise",
        description="a linear layer on noise",
        make_model=lambda: nn.Linear(6, 3),
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=batch,
        loss=class_loss,
        score=lambda model: sum(p.abs().sum().item() for p in model.parameters()),
        metric="size",
        seed=seed,
    )


TRAINED_SMALL = convergence.Trained(
    "noise", noise, 20, 10, "terngrad", PS_ONEBIT, "lstm", less_is_better=True
)
SMALL = {
    "table1": throughput.table1,
    "table6": sizes.table6,
    "figure9": partial(throughput.figure9, trained={"lstm": TRAINED["lstm"]}, sizes=(2, 4)),
    "figure11": partial(throughput.figure11, trained={"vgg19": TRAINED["vgg19"]}, sizes=(2,)),
    "figure13": partial(speed.figure13, numel=2**14, rounds=4, num_hosts=2),
    "figure14": partial(accuracy.figure14, sizes=(2**15, 2**20, 2**26), num_hosts=4),
    "figure15": partial(varied.figure15, num_hosts=2),
    "figure16": partial(convergence.figure16, models=(TRAINED_SMALL,), num_hosts=2),
}


@pytest.fixture(scope="module")
def small() -> dict[str, Findings]:
    return {name: measure(ask()) for name, measure in SMALL.items()}


@pytest.mark.parametrize("name", SMALL)
def test_figures(small: dict[str, Findings], name: str, tmp_path: Path) -> None:
    law_of_figures("hipress", name, small[name], tmp_path)


# Systems


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_sends_all_of_a_model(name: str) -> None:
    system, profile = SYSTEMS[name], catalogue.load("lstm")
    cluster = EC2.cluster(4, is_push_pull=system.is_push_pull)
    plan = system.plan(profile, cluster)
    check(plan, profile)
    assert bool(plan.exchanges) == (name not in (BYTEPS, RING))


def test_each_host_serves_one_partition_of_a_message() -> None:
    profile = catalogue.load("vgg19")
    plan = SYSTEMS[BYTEPS_ONEBIT].plan(profile, EC2.cluster(4))
    counts = [len(one.chunks) for one in plan.messages]
    assert set(counts[:-1]) == {4}
    assert counts[-1] <= 4
    assert max(4 * c.numel for one in plan.messages for c in one.chunks) <= PARTITION_BYTES


# Verdicts
