"""SSFusion's figures in small: their shapes, and verdicts on rows that are made up."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from gradwire.planning import catalogue
from gradwire.planning.data.plan import DENSE
from gradwire.planning.data.profile import ProfiledTensor
from gradwire.planning.fusion import Arrival, SparseCost, arrivals, best_fusion
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.timeline import simulate
from papers import links, page
from papers.frame import Findings, Reproduction
from papers.ssfusion import collectives, compare, profiling
from papers.ssfusion.breakdown import figure13
from papers.ssfusion.collectives import figure9, implied
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
from papers.ssfusion.printed import BASELINES, OKTOPK, SMALL_NUMEL, TABLE_3_GPU_S
from papers.ssfusion.profiling import table5
from papers.ssfusion.schemes import MULTI, PER_TENSOR, SELECTIVE, apart, figure5
from papers.ssfusion.setting import (
    CLOUD,
    DENSITY,
    GPU,
    LOCAL,
    LOCAL_RANKS,
    MEASURED_GBIT,
    NUM_TENSORS,
    SPARSIFIER,
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


def test_dense_bytes_are_those_of_the_smallest_tensors() -> None:
    profile, cluster = LOCAL.profile("resnet152"), LOCAL.cluster(4)
    plan = apart(profile, [arrivals(profile)], SMALL_NUMEL)
    timing = run_on_clock(plan, profile, cluster)
    found = compare.dense_share(plan, profile, cluster, timing)
    numels = [one.numel for layer in profile.layers for one in layer.tensors]
    dense = 4 * sum(numel for numel in numels if numel <= SMALL_NUMEL)
    sparse = 8 * sum(max(1, round(DENSITY * n)) for n in numels if n > SMALL_NUMEL)
    assert found == pytest.approx(dense / (dense + sparse), rel=1e-3)


def test_stretches_of_time_are_counted_once() -> None:
    assert links._united([(3, 4), (0, 2), (1, 2.5), (4, 5)]) == [(0, 2.5), (3, 5)]


# Figures 2 and 5


def test_a_degree_fuses_the_first_tensors() -> None:
    every = [arrival(numel) for numel in (1, 2, 3, 4, 5)]
    found = [[one.tensor.numel for one in group] for group in fused(every, 40)]
    assert found == [[1, 2], [3], [4], [5]]
    assert len(fused(every, 0)) == 5
    assert fused(every, 100) == [every]


def test_selection_shrinks_with_the_degree(small: dict[str, Findings]) -> None:
    rows = small["figure2"].rows
    shares = [row["fraction_selection"] for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert [row["num_messages"] for row in rows] == [NUM_TENSORS, 375, 1]
    first = rows[0]
    assert first["selection_s"] >= NUM_TENSORS * TABLE_3_GPU_S[0]
    assert first["fraction_selection"] == first["selection_s"] / first["iteration_s"]


def test_only_large_tensors_are_selected_from() -> None:
    profile = LOCAL.profile("resnet152")
    cost = SparseCost.of(LOCAL.cluster(LOCAL_RANKS), SPARSIFIER, DENSITY)
    groups = best_fusion(arrivals(profile), cost)
    numels = {one.name: one.numel for layer in profile.layers for one in layer.tensors}
    plan = apart(profile, groups, SMALL_NUMEL)
    inline = {name for message in plan.messages for name in message.inline}
    assert inline == {name for name, numel in numels.items() if numel > SMALL_NUMEL}
    tiny = apart(profile, [[one] for one in arrivals(profile)], SMALL_NUMEL)
    assert {m.exchange for m in tiny.messages if not m.inline} == {DENSE}


def test_selective_lies_between_the_two_others(small: dict[str, Findings]) -> None:
    rows = {row["name"]: row for row in small["figure5"].rows}
    assert rows[MULTI]["iteration_s"] < rows[SELECTIVE]["iteration_s"]
    assert rows[SELECTIVE]["iteration_s"] < rows[PER_TENSOR]["iteration_s"]
    assert rows[PER_TENSOR]["num_selections"] == NUM_TENSORS


# Table 2


def test_table_2_is_counted_in_the_catalogue(small: dict[str, Findings]) -> None:
    by_name = {row["name"]: row for row in small["table2"].rows}
    assert by_name["resnet152"]["num_tensors"] == NUM_TENSORS
    assert [claim.agrees for claim in small["table2"].claims].count(True) >= 1


# Figure 9


def test_the_rate_of_the_second_reading_is_that_of_figure_9() -> None:
    """The likest pair of models is the one taken, and implies the rate of the reading."""
    found = {model: catalogue.load(model).size_bytes for model in collectives.MODELS}
    pair, rates = implied(found)[0]
    assert pair == collectives.TAKEN
    assert rates == pytest.approx((MEASURED_GBIT, MEASURED_GBIT), rel=0.01)


def test_an_all_gather_grows_with_ranks_and_an_all_reduce_hardly(
    small: dict[str, Findings],
) -> None:
    rows = [row for row in small["figure9"].rows if row["name"] == "bert_large"][:4]
    gathers = [row["all_gather_s"] for row in rows]
    assert gathers[-1] / gathers[0] == pytest.approx(9, rel=0.01)
    assert rows[-1]["all_reduce_s"] < 1.2 * rows[0]["all_reduce_s"]


# Table 5


def test_profiling_is_a_share_of_a_stated_training(small: dict[str, Findings]) -> None:
    (row,) = small["table5"].rows
    assert row["fraction"] == pytest.approx(
        (row["planning_s"] + row["profiled_s"]) / (row["num_steps"] * row["iteration_s"]), rel=1e-4
    )
    assert row["profiled_s"] == profiling.PROFILED * row["iteration_s"]


def test_equation_2_as_printed_sends_more_dense(small: dict[str, Findings]) -> None:
    rows = [row for row in small["figure11"].rows if row["name"] == VARIANTS["naive"]]
    literal = [row for row in rows if "as printed" in str(row["reading"])]
    bounded = [row for row in rows if row["reading"] == CLOUD.name and row["num_ranks"] == 16]
    assert literal[0]["fraction_dense"] > bounded[0]["fraction_dense"]
