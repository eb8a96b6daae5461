"""Encodings of HiPress and ZEN that are timed on one rank: rows are what they say."""

from __future__ import annotations

import pytest
import torch

from gradwire.contract.registry import load
from gradwire_bench.micro.draws import IndexDraws
from papers.hipress import encode_many
from papers.zen import partition

DRAWS = IndexDraws(numel=70_000, world=5, density=0.02)


def test_a_round_averages_what_the_ranks_have() -> None:
    rank = partition._Rank(DRAWS)
    for step in rank.steps().values():
        step()
    pool = DRAWS.pool()
    want_N = torch.zeros(DRAWS.numel)
    for number in range(DRAWS.world):
        entries = partition._entries(DRAWS.taken(number, pool), number)
        want_N[entries.indices_K.long()] += entries.values
    torch.testing.assert_close(rank.out_N, want_N / DRAWS.world)
    assert torch.equal(rank.bits, rank.pulled[0].buffer)


def test_rows_of_the_partition_are_its_steps_and_their_sum() -> None:
    rows = partition.measure(DRAWS, 125e6, threads=1, rounds=4)
    reported = {str(row["name"]): row for row in rows}
    first, *others = partition.CPU_STEPS
    assert [*reported] == ["copy", first, "algorithm 1", *others, "zen"]
    longest_s = max(
        float(str(reported[name]["kernel_s_q1"])) for name in partition.CPU_STEPS
    )
    assert float(str(reported["zen"]["kernel_s"])) >= longest_s > 0
    # Entries are few: most of what the dense all-reduce sends is saved, but not all.
    dense_s = 2 * 4 / 5 * 4 * DRAWS.numel / 125e6
    assert 0.5 * dense_s < float(str(reported["zen"]["saved_s"])) < dense_s


def test_a_batch_is_timed_beside_a_call_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encode_many, "MODELS", ("made up",))
    monkeypatch.setattr(
        encode_many, "sizes_of", lambda model: [100, encode_many.SMALL + 1, 64]
    )
    rows = encode_many.measure([load("compress", "onebit")()], 1, 4)
    assert [row["num_tensors"] for row in rows] == [3, 2]
    assert all(
        float(str(row[key])) > 0
        for row in rows
        for key in ("batch_s", "call_a_tensor_s")
    )
    assert "num_dense" not in rows[0]
