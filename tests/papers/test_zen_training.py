"""Figures 11 to 14 of ZEN: what is simulated, what a claim is held to, and a small run
for real.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.sparsity import TensorSparsity, UnitSparsity
from papers.frame import Row
from papers.zen import training
from papers.zen import training_model as model_of
from papers.zen.training import PARTS, Part
from tests.bench.testbed.forked import fork_ranks
from tests.papers.small import ask

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


SIZES = {"vocabulary": 200, "embedding": 16, "hidden": 8, "num_held_out": 8}


def test_every_scheme_trains_alike_for_real(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part: Part = replace(
        PARTS["figure11"],
        own=replace(PARTS["figure11"].own, sizes=SIZES),
        hosts={True: (2,)},
        num_steps={True: 2},
    )
    losses: dict[str, list[float]] = {}
    made = training._measured_row

    def noted(
        given: Part, hosts: int, ranks: list[dict[str, list[list[float]]]]
    ) -> Row:
        losses.update(
            {scheme: [loss for *_, loss in ranks[0][scheme]] for scheme in ranks[0]}
        )
        return made(given, hosts, ranks)

    monkeypatch.setattr(training, "_measured_row", noted)
    fork_ranks(monkeypatch, training)
    [row], _ = training.measured(ask(folder), part)
    assert row["kind"] == "measured"
    assert 0 < float(str(row["fraction_computing"])) < 1
    own = [losses[scheme] for scheme in training.SCHEMES]
    for other in own[1:]:
        assert other == pytest.approx(own[0], rel=1e-4)
