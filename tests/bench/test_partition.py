"""``bench partition``: rows are what they say, and the steps make the mean of all ranks."""

from __future__ import annotations

import torch

from gradwire_bench.micro import partition as bench
from gradwire_bench.micro.draws import IndexDraws

DRAWS = IndexDraws(numel=70_000, world=5, density=0.02)


def test_a_round_averages_what_the_ranks_have() -> None:
    rank = bench._Rank(DRAWS)
    for step in rank.steps().values():
        step()
    pool = DRAWS.pool()
    want_N = torch.zeros(DRAWS.numel)
    for number in range(DRAWS.world):
        entries = bench._entries(DRAWS.taken(number, pool), number)
        want_N[entries.indices_K.long()] += entries.values
    torch.testing.assert_close(rank.out_N, want_N / DRAWS.world)
    assert torch.equal(rank.bits, rank.pulled[0].buffer)


def test_rows_are_the_steps_and_their_sum() -> None:
    rows = bench.measure(DRAWS, 125e6, threads=1, rounds=4)
    told = {str(row["name"]): row for row in rows}
    assert [*told] == ["copy", *bench.CPU_STEPS, "zen"]
    longest_s = max(float(str(told[name]["kernel_s_q1"])) for name in bench.CPU_STEPS)
    assert float(str(told["zen"]["kernel_s"])) >= longest_s > 0
    # Entries are few: most of what the dense all-reduce sends is saved, but not all.
    dense_s = 2 * 4 / 5 * 4 * DRAWS.numel / 125e6
    assert 0.5 * dense_s < float(str(told["zen"]["saved_s"])) < dense_s
