"""Figures 11 to 14 of ZEN: what is simulated, what a claim is held to, and a small run for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.sparsity import TensorSparsity, UnitSparsity
from papers.frame import Ask, Row
from papers.zen import training
from papers.zen import training_model as model_of
from papers.zen.training import PARTS, Part
from tests.bench.testbed.forked import fork_ranks
from tests.papers.figures import ask
from tests.papers.zen_small import claim_of

pytestmark = pytest.mark.slow

LSTM = model_of.NATURAL[0]
LLAMA = model_of.SPARSIFIED[0]


def uniform(density: float) -> TensorSparsity:
    units = UnitSparsity(width=1, num_units=1000, density=density)
    return TensorSparsity(name="t", units=units, blocks=units)


def test_a_step_is_computation_and_communication() -> None:
    step_s, computing_s = model_of.step_of(LSTM, uniform(0.01), 16, 25)
    cluster = Cluster(num_ranks=16, rate_bytes_per_s=25e9 / 8)
    dense_s = cluster.all_reduce_s(4 * 20e6) + cluster.all_reduce_s(4 * 406e6)
    assert computing_s == model_of.LSTM_S
    assert step_s["dense"] == pytest.approx(model_of.LSTM_S + dense_s)
    gathered = 15 * 8 * 4.06e6 / (25e9 / 8)
    fixed_s = model_of.LSTM_S + cluster.all_reduce_s(4 * 20e6)
    assert step_s["allgather_sparse"] - fixed_s == pytest.approx(gathered, rel=0.05)
    faster, _ = model_of.step_of(LSTM, uniform(0.01), 16, 100)
    assert all(faster[scheme] < step_s[scheme] for scheme in step_s)


def test_a_sparsified_model_travels_in_buckets() -> None:
    whole, _ = model_of.step_of(LLAMA, uniform(0.05), 4, 25)
    half, _ = model_of.step_of(replace(LLAMA, num_sparse=1.5e9), uniform(0.05), 4, 25)
    for scheme in whole:
        assert whole[scheme] == pytest.approx(2 * half[scheme], rel=1e-3)


def one(scheme: str, ratio: float, machines: int) -> Row:
    step_s = dict.fromkeys(training.SCHEMES, 2.0) | {training.ZEN: 1.0, scheme: ratio}
    return model_of.step_row("simulated", "LSTM", machines, step_s, 0.1)


@pytest.mark.parametrize(("ratio", "agrees"), [(1.67, True), (1.2, False), (2.2, False)])
def test_the_lstms_speedup_is_held_against_the_papers(ratio: float, agrees: bool) -> None:
    full = Ask(quick=False, report=lambda fraction, what: None, earlier={})
    part = PARTS["figure11"]
    rows = [one("sparcml", ratio, 16)]
    claim = training._speedup_claim(full, part, LSTM, "sparcml", 1.67, rows)
    assert (claim.agrees, bool(claim.why)) == (agrees, not agrees)
    quick = training._speedup_claim(ask(), part, LSTM, "sparcml", 1.67, rows)
    assert quick.agrees is None
    assert "without --quick" in quick.why
    assumed = training._speedup_claim(full, part, LLAMA, "sparcml", 1.67, rows)
    assert assumed.agrees is None
    assert "prints no computation" in assumed.why


@pytest.mark.parametrize(("last", "agrees"), [(3.0, True), (1.1, False)])
def test_growth_is_that_of_a_model_without_assumptions(last: float, agrees: bool) -> None:
    full = Ask(quick=False, report=lambda fraction, what: None, earlier={})
    rows = [one("sparcml", 1.5, 2), one("sparcml", last, 16)]
    for row, seconds in zip(rows, (1.1, 2.0), strict=True):
        row["step_s_omnireduce"] = seconds
    by_model = {model.name: [] for model in model_of.NATURAL} | {"LSTM": rows}
    claim = training._growing(full, PARTS["figure11"], by_model)
    assert (claim.agrees, bool(claim.why)) == (agrees, not agrees)
    assert training._growing(ask(), PARTS["figure11"], by_model).agrees is None
    empty = {model.name: [] for model in model_of.SPARSIFIED}
    assert training._growing(full, PARTS["figure13"], empty).agrees is None


SMALL = {
    "figure11": {"vocabulary": 200, "embedding": 16, "hidden": 8, "num_held_out": 8},
    "figure13": {"vocabulary": 200, "width": 8, "num_held_out": 8},
}


@pytest.mark.parametrize("name", SMALL)
def test_every_scheme_trains_alike_for_real(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part: Part = replace(
        PARTS[name],
        own=replace(PARTS[name].own, sizes=SMALL[name]),
        hosts={True: (2,)},
        num_steps={True: 2},
    )
    losses: dict[str, list[float]] = {}
    made = training._measured_row

    def noted(given: Part, hosts: int, ranks: list[dict[str, list[list[float]]]]) -> Row:
        losses.update({scheme: [loss for *_, loss in ranks[0][scheme]] for scheme in ranks[0]})
        return made(given, hosts, ranks)

    monkeypatch.setattr(training, "_measured_row", noted)
    fork_ranks(monkeypatch, training)
    [row], _ = training.measured(ask(folder), part)
    assert row["kind"] == "measured"
    assert 0 < float(str(row["fraction_computing"])) < 1
    own = [losses[scheme] for scheme in training.SCHEMES if name == "figure11" or scheme != "dense"]
    for other in own[1:]:
        assert other == pytest.approx(own[0], rel=1e-4)


def test_claims_that_nothing_was_simulated_for_say_why(folder: Path) -> None:
    found = training.figure(ask(folder), "figure11", lambda asked, part: ([], True))
    assert {row["kind"] for row in found.rows} == {"simulated"}
    absent = claim_of(found.claims, "DeepFM trains 1.44")
    assert absent.agrees is None
    assert absent.why
