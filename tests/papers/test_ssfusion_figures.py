"""SSFusion's figures in small: their shapes, and verdicts on rows that are made up."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from gradwire.planning.data.profile import ProfiledTensor
from gradwire.planning.fusion import Arrival
from gradwire.planning.simulation.timeline import simulate
from papers import links, page
from papers.frame import Findings, Reproduction
from papers.ssfusion import compare
from papers.ssfusion.breakdown import figure13
from papers.ssfusion.collectives import figure9
from papers.ssfusion.compare import (
    PARTS,
    Case,
    row_of,
)
from papers.ssfusion.contenders import (
    CONTENDERS,
    LACKING,
    RIVALS,
    UNCOMPRESSED,
    VARIANTS,
    addressable,
)
from papers.ssfusion.degrees import figure2, fused
from papers.ssfusion.duration import figure12_time
from papers.ssfusion.latency import figure4, table3
from papers.ssfusion.printed import BASELINES, OKTOPK
from papers.ssfusion.profiling import table5
from papers.ssfusion.schemes import figure5
from papers.ssfusion.setting import (
    CLOUD,
    GPU,
)
from papers.ssfusion.sizes import table2
from papers.ssfusion.throughput import figure11
from papers.ssfusion.varied import figure14, figure15, figure16, figure17
from tests.papers.figures import ask, law_of_figures

pytestmark = pytest.mark.slow


SLOWER = {"dgc": 1.0, "gaussiank": 1.5, "redsync": 1.2, "sidco": 2.0}
SMALL = {
    "figure2": partial(figure2, models=("resnet152",), degrees=(0, 20, 100)),
    "figure4": partial(figure4, sizes=(2**8, 2**12, 2**14)),
    "table2": table2,
    "figure5": partial(figure5, models=("resnet152",)),
    "table3": table3,
    "figure9": figure9,
    "figure11": partial(figure11, models=("resnet152",), ranks=(8, 16)),
    "figure12_time": partial(figure12_time, models=("lstm",), num_ranks=4),
    "figure13": partial(figure13, models=("resnet152",), num_ranks=8),
    "figure14": partial(figure14, models=("resnet152",), num_ranks=8, slower=SLOWER),
    "figure15": partial(figure15, num_ranks=8),
    "figure16": partial(figure16, models=("resnet152",), num_ranks=8),
    "figure17": partial(figure17, models=("gpt2_xl",), num_ranks=4),
    "table5": partial(table5, models=("resnet152",), num_ranks=8),
}


@pytest.fixture(scope="module")
def small() -> dict[str, Findings]:
    return {name: measure(ask()) for name, measure in SMALL.items()}


@pytest.mark.parametrize("name", SMALL)
def test_figures(small: dict[str, Findings], name: str, tmp_path: Path) -> None:
    law_of_figures("ssfusion", name, small[name], tmp_path)


def test_every_figure_of_the_page_is_measured_here_or_elsewhere() -> None:
    paper: Reproduction = page("ssfusion")
    names = {figure.name for figure in paper.figures}
    assert names == {*SMALL, "table1", "figure12", "figure11_replayed"}
    assert len({figure.measure for figure in paper.figures}) == len(names)


# Schemes


def test_schemes_of_the_paper_are_here_or_said_to_be_lacking() -> None:
    names = [one.name for one in CONTENDERS]
    assert len(set(names)) == len(names)
    assert {*RIVALS, *LACKING} == set(BASELINES)
    assert not {*RIVALS} & {*LACKING}
    assert set(names) == {*RIVALS, *VARIANTS.values(), *UNCOMPRESSED}


def arrival(numel: int) -> Arrival:
    return Arrival(ProfiledTensor(name=f"{numel}", shape=(numel,)), 0.0)


def test_as_few_messages_as_hold_a_model() -> None:
    every = [arrival(numel) for numel in (5, 4, 3, 12, 2)]
    groups = addressable(every, most=9)
    assert [[one.tensor.numel for one in group] for group in groups] == [[5, 4], [3], [12], [2]]
    assert addressable(every) == [every]


# Rows: where an iteration's seconds go


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda one: one.name)
def test_parts_add_up_to_what_the_simulator_says(contender: compare.Contender) -> None:
    case = Case(CLOUD, "resnet152", 8)
    profile = CLOUD.profile("resnet152")
    row = row_of(case, profile, contender)
    assert sum(row[key] for key in PARTS) == pytest.approx(row["iteration_s"])
    assert all(row[key] >= -1e-12 for key in PARTS)
    cluster = CLOUD.cluster(8)
    plan = contender.plan(profile, cluster, case.choice)
    trace = simulate(plan, profile, cluster)
    assert row["iteration_s"] == pytest.approx(trace.iteration_s)
    wire_s = sum(span.duration_s for span in trace.spans if span.lane == "communication")
    assert row["link_s"] <= wire_s * (1 + 1e-9)
    assert 0 <= row["fraction_dense"] <= 1
    if contender.name in UNCOMPRESSED:
        assert row["fraction_dense"] == 1
    if contender.name in VARIANTS.values():
        assert 0 < row["fraction_dense"] < 1


def test_selection_behind_the_backward_pass_counts_as_selection() -> None:
    """Ok-Topk's message is the whole model's: nothing of its selection is hidden."""
    contender = next(one for one in CONTENDERS if one.name == OKTOPK)
    profile = CLOUD.profile("resnet152")
    row = row_of(Case(CLOUD, "resnet152", 8), profile, contender)
    numel = profile.size_bytes // 4
    assert row["selection_s"] >= GPU.seconds(numel)
    assert row["selection_s"] + row["communication_s"] < 1.5 * GPU.seconds(numel)


def test_stretches_of_time_are_counted_once() -> None:
    assert links._united([(3, 4), (0, 2), (1, 2.5), (4, 5)]) == [(0, 2.5), (3, 5)]


# Figures 2 and 5


def test_a_degree_fuses_the_first_tensors() -> None:
    every = [arrival(numel) for numel in (1, 2, 3, 4, 5)]
    found = [[one.tensor.numel for one in group] for group in fused(every, 40)]
    assert found == [[1, 2], [3], [4], [5]]
    assert len(fused(every, 0)) == 5
    assert fused(every, 100) == [every]


# Table 2


# Figure 9


# Table 5
