"""SSFusion: schemes, where an iteration's seconds go, groups of tensors, and what is
missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from gradwire.planning.data.profile import ProfiledTensor
from gradwire.planning.simulation.timeline import simulate
from gradwire_bench.workloads.task import Batch, TrainingTask, class_loss, random_of
from gradwire_lab.planning.sparse_fusion import Arrival
from papers import links
from papers.frame import Claim, Findings, Row
from papers.ssfusion import missing, training
from papers.ssfusion.compare import PARTS, Case, improvement, row_of
from papers.ssfusion.contenders import (
    CONTENDERS,
    LACKING,
    RIVALS,
    UNCOMPRESSED,
    VARIANTS,
    addressable,
)
from papers.ssfusion.convergence import figure12
from papers.ssfusion.degrees import fused
from papers.ssfusion.grouped import Grouped
from papers.ssfusion.missing import DEGREES, Model, missing_rates, table1, ways
from papers.ssfusion.printed import BASELINES, OKTOPK
from papers.ssfusion.setting import CLOUD, GPU, LOCAL, LOCAL_RANKS
from papers.ssfusion.training import FOLDER, SCHEMES, enlarged, grouped
from tests.each import each
from tests.papers.small import SSFUSION_TRAINED, ask, tiny

pytestmark = pytest.mark.slow


def test_schemes_of_the_paper_are_here_or_said_to_be_lacking() -> None:
    names = [one.name for one in CONTENDERS]
    assert len(set(names)) == len(names)
    assert {*RIVALS, *LACKING} == set(BASELINES)
    assert not {*RIVALS} & {*LACKING}
    assert set(names) == {*RIVALS, *VARIANTS.values(), *UNCOMPRESSED}


def numels(groups: list[list[Arrival]]) -> list[list[int]]:
    return [[one.tensor.numel for one in group] for group in groups]


def test_tensors_are_fused_from_the_first_on() -> None:
    def arrivals(*numels: int) -> list[Arrival]:
        return [Arrival(ProfiledTensor(name=f"{n}", shape=(n,)), 0.0) for n in numels]

    every = arrivals(5, 4, 3, 12, 2)
    assert numels(addressable(every, most=9)) == [[5, 4], [3], [12], [2]]
    assert addressable(every) == [every]
    every = arrivals(1, 2, 3, 4, 5)
    assert numels(fused(every, 40)) == [[1, 2], [3], [4], [5]]
    assert len(fused(every, 0)) == 5
    assert fused(every, 100) == [every]


@pytest.mark.smoke
def test_a_part_of_the_papers_comparisons_can_refute_a_range_and_never_confirm_it() -> (
    None
):
    def claim(speed: float, missing: str) -> Claim:
        rows: list[Row] = [
            {"name": name, "model": "m", "num_ranks": 16, "throughput": throughput}
            for name, throughput in (("ours", speed), ("other", 1.0))
        ]
        return improvement(
            rows,
            (0.2, 0.4),
            "ours outperforms the other",
            "figure 11",
            ours="ours",
            others=("other",),
            reason=lambda pair, case: "slower",
            missing=missing,
        )

    assert claim(1.3, "").agrees is True
    assert claim(1.3, "on 32 GPUs").agrees is None
    assert "on 32 GPUs" in claim(1.3, "on 32 GPUs").why
    assert claim(1.1, "on 32 GPUs").agrees is False


@each("contender", CONTENDERS, ids=lambda one: one.name)
def test_parts_add_up_to_what_the_simulator_says(contender: Any) -> None:
    case, profile, cluster = (
        Case(CLOUD, "resnet152", 8),
        CLOUD.profile("resnet152"),
        CLOUD.cluster(8),
    )
    row = row_of(case, profile, contender)
    assert sum(row[key] for key in PARTS) == pytest.approx(row["iteration_s"])
    assert all(row[key] >= -1e-12 for key in PARTS)
    trace = simulate(contender.plan(profile, cluster, case.choice), profile, cluster)
    assert row["iteration_s"] == pytest.approx(trace.iteration_s)
    wire_s = sum(
        span.duration_s for span in trace.spans if span.lane == "communication"
    )
    assert row["link_s"] <= wire_s * (1 + 1e-9)
    assert 0 <= row["fraction_dense"] <= 1
    if contender.name in UNCOMPRESSED:
        assert row["fraction_dense"] == 1
    if contender.name in VARIANTS.values():
        assert 0 < row["fraction_dense"] < 1
    # of the whole model in one message: selection is not hidden
    if contender.name == OKTOPK:
        selection_s = GPU.seconds(profile.size_bytes // 4)
        assert selection_s <= row["selection_s"]
        assert row["selection_s"] + row["communication_s"] < 1.5 * selection_s


def test_stretches_of_time_are_counted_once() -> None:
    assert links.united([(3, 4), (0, 2), (1, 2.5), (4, 5)]) == [(0, 2.5), (3, 5)]


# Figure 12

SHAPES = ((3, 4), (5,), (2, 2, 2))
SPEC = TensorSpec("gradient", 25, shapes=SHAPES)


def test_groups_give_what_their_exchanges_give() -> None:
    """Tensors 2 and 0 share a message, tensor 1 is by itself; and nothing is lost."""
    sparse, plain = exchange_for(topk(density=0.2)), exchange_for(none())
    made = Grouped((((2, 0), sparse), ((1,), plain)))
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(25, generator=draw) for _ in range(3)]
    means = [torch.empty_like(one) for one in given]
    all_steps = [
        made.synchronise(Member(rank, 3), made.init(SPEC, 3), given[rank], means[rank])
        for rank in range(3)
    ]
    states = drive(all_steps, seed=0).results
    both = [torch.cat([one[17:25], one[0:12]]) for one in given]
    spec = TensorSpec("group", 20, shapes=(SHAPES[2], SHAPES[0]))
    expected = run_local(sparse, both, [sparse.init(spec, 3) for _ in range(3)])
    for mean_N, state, (group_M, _, inner) in zip(means, states, expected, strict=True):
        assert torch.equal(torch.cat([mean_N[17:25], mean_N[0:12]]), group_M)
        assert torch.allclose(mean_N[12:17], torch.stack(given).mean(0)[12:17])
        (kept_M,) = residuals(state).values()
        assert torch.equal(kept_M, inner.residual_N)


@each("planner", ["ssfusion", "omgs", "cupcake"])
def test_a_plan_becomes_groups_of_all_tensors(planner: str) -> None:
    profile = enlarged(tiny(), "resnet152")
    plan = load("planner", planner)(profile, LOCAL.cluster(LOCAL_RANKS))
    made = grouped(plan, profile)
    places = [place for own, _ in made.parts for place in own]
    assert sorted(places) == [0, 1, 2, 3]
    assert len(made.parts) == len(plan.messages)


def test_trainings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = figure12(ask(tmp_path), [SSFUSION_TRAINED])
    assert [row["name"] for row in found.rows] == [scheme.name for scheme in SCHEMES]
    assert len(list((tmp_path / FOLDER).iterdir())) == len(SCHEMES)
    assert found.complete

    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(training, "train", refuse)
    assert figure12(ask(tmp_path), [SSFUSION_TRAINED]) == found


# Table 1


class Quiet(nn.Module):
    """Five linear layers, each with gradients a hundredfold smaller than those
    before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12, bias=False) for _ in range(5)])

    def forward(self, x_BN: Tensor) -> Tensor:
        parts = [
            layer(x_BN) * 10.0 ** (-2 * place)
            for place, layer in enumerate(self.layers)
        ]
        return torch.stack(parts).sum(0)


def quiet() -> TrainingTask:
    def batch(step: int, rank: int, world: int) -> Batch:
        random = random_of(0, step, rank, world)
        return torch.randn(8, 12, generator=random), torch.randint(
            12, (8,), generator=random
        )

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
    given_N, sent_N = (
        torch.tensor([1.0, 2.0, 0.0, 0.0, 3.0]),
        torch.tensor([0.0, 2.0, 0, 0, 0]),
    )
    assert missing._missing(given_N, sent_N, [2, 2, 1]) == 1


@each("feedback", [False, True])
def test_a_model_misses_layers_as_more_of_them_are_fused(feedback: bool) -> None:
    """Gradients are a hundredfold apart, so fused all but one of five layers are
    missing.
    """
    found = {
        way.name: missing_rates(quiet(), way, 2, world=2)[0] for way in ways(feedback)
    }
    assert found["topk, 100 % fused"] == pytest.approx(0.8)
    of_dgc = [found[f"dgc, {degree} % fused"] for degree in DEGREES]
    assert of_dgc == sorted(of_dgc)
    assert of_dgc[0] == 0
    assert [rate for name, rate in found.items() if "selective" in name] == [0, 0]


def test_the_table_says_what_was_not_measured() -> None:
    def findings(model: Model) -> Findings:
        return table1(ask(), [model])

    lacking = findings(Model("none", quiet, lambda: "its data are elsewhere"))
    assert not lacking.complete
    assert lacking.rows[0]["why"] == "its data are elsewhere"
    found = findings(Model("quiet", quiet))
    assert found.complete
    assert [claim.agrees for claim in found.claims] == [True] * 4
