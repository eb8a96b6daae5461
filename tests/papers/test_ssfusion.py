"""Table 1 of SSFusion: what counts as missing, and the rates of a model that is sure to miss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradwire_bench.workloads.task import Batch, TrainingTask, class_loss, random_of
from papers.frame import Ask, Findings
from papers.ssfusion import missing
from papers.ssfusion.missing import DEGREES, Model, missing_rates, table1, ways

pytestmark = pytest.mark.slow


class Quiet(nn.Module):
    """Three linear layers, of which the first and the last have ever smaller gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12, bias=False) for _ in range(5)])

    def forward(self, x_BN: Tensor) -> Tensor:
        parts = [layer(x_BN) * 10.0 ** (-2 * place) for place, layer in enumerate(self.layers)]
        return torch.stack(parts).sum(0)


def quiet() -> TrainingTask:
    def batch(step: int, rank: int, world: int) -> Batch:
        random = random_of(0, step, rank, world)
        return torch.randn(8, 12, generator=random), torch.randint(12, (8,), generator=random)

    return TrainingTask(
        name="quiet",
        description="layers of gradients a hundredfold apart",
        make_model=Quiet,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=batch,
        loss=class_loss,
        score=lambda model: 0.0,
        metric="loss",
    )


def test_what_is_all_zeros_is_not_missing() -> None:
    given_N, sent_N = torch.tensor([1.0, 2.0, 0.0, 0.0, 3.0]), torch.tensor([0.0, 2.0, 0, 0, 0])
    assert missing._missing(given_N, sent_N, [2, 2, 1]) == 1


@pytest.mark.parametrize("feedback", [False, True])
def test_rates_of_a_model_that_misses(feedback: bool) -> None:
    """Gradients are a hundredfold apart, so fused all but one of five layers are missing."""
    found = {way.name: missing_rates(quiet(), way, 2, world=2)[0] for way in ways(feedback)}
    assert found["topk, 100 % fused"] == pytest.approx(0.8)
    assert [found[f"dgc, {degree} % fused"] for degree in DEGREES] == sorted(
        found[f"dgc, {degree} % fused"] for degree in DEGREES
    )
    assert found["dgc, 0 % fused"] == 0
    assert [rate for name, rate in found.items() if "selective" in name] == [0, 0]


def test_the_table_says_what_was_not_measured() -> None:
    def findings(model: Model) -> Findings:
        return table1(Ask(True, lambda fraction, what: None, {}), [model])

    lacking = findings(Model("none", quiet, lambda: "its data are elsewhere"))
    assert not lacking.complete
    assert lacking.rows[0]["why"] == "its data are elsewhere"
    found = findings(Model("quiet", quiet))
    assert found.complete
    assert [claim.agrees for claim in found.claims] == [True] * 4
