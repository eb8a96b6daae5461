"""Selection and scatter_add: the C++ against its definition, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradwire.errors import InvalidSetting
from gradwire.kernels import select
from gradwire.kernels.libraries import reference_only
from gradwire_lab.compress._ranges import topk_ranges
from tests.each import each
from tests.kernels.vectors import (
    cases,
    compiled,
    num_threads,
    residual_for,
    same_bits,
    vector,
)

__all__ = ["compiled"]
DENSITIES = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0])


def selected(x_N, k, residual_N=None):
    indices_K = torch.full((k,), -1, dtype=torch.int32)
    values_K = torch.full((k,), 7.0, dtype=x_N.dtype)
    after_N = None if residual_N is None else residual_N.clone()
    select.topk(x_N, indices_K, values_K, after_N)
    return indices_K, values_K, after_N


@each("forced", [False, True])
def test_ties_go_to_the_lowest_index(forced):
    context = reference_only() if forced else num_threads(1)
    with context:
        assert selected(torch.tensor([1.0, -2.0, 2.0, 2.0, -2.0]), 2)[0].tolist() == [
            1,
            2,
        ]
        assert selected(torch.zeros(100_000), 3)[0].tolist() == [0, 1, 2]


@pytest.mark.usefixtures("compiled")
@settings(max_examples=50, deadline=None, derandomize=True)
@example(case=(200_003, "not finite", 1), density=0.01, with_residual=True)
@example(case=(200_003, "mostly zeros", 0), density=0.01, with_residual=True)
@example(case=(200_003, "all equal", 0), density=0.01, with_residual=True)
@example(case=(200_003, "one loud layer", 0), density=0.01, with_residual=True)
@given(case=cases, density=DENSITIES, with_residual=st.booleans())
def test_cpp_is_the_reference(case, density, with_residual):
    numel, kind, seed = case
    x_N = vector(numel, kind, seed)
    residual_N = residual_for(x_N, seed) if with_residual else None
    k = round(numel * density)
    got = selected(x_N, k, residual_N)
    with reference_only():
        want = selected(x_N, k, residual_N)
    for got_part, want_part in zip(got[: 2 + with_residual], want, strict=False):
        assert same_bits(got_part, want_part)


@pytest.mark.usefixtures("compiled")
def test_a_sample_that_misleads_only_costs_time():
    # Loud elements at every 16th place look a sixteenth as frequent to runs of 16, and
    # a vector whose two halves differ by orders of magnitude has a gap where the
    # threshold is sought.
    spikes_N = vector(400_000, "normal", 2)
    spikes_N[::16] *= 1e3
    halves_N = vector(400_000, "normal", 3)
    halves_N[:200_000] *= 1e-6
    levels_N = vector(400_000, "normal", 4).mul(2).round().div(2)
    for x_N in (spikes_N, halves_N, levels_N):
        for k in (4_000, 25_000, 25_001):
            got = selected(x_N, k, torch.zeros(x_N.numel()))
            with reference_only():
                want = selected(x_N, k, torch.zeros(x_N.numel()))
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.usefixtures("compiled")
@each("kind", ["ties", "not finite"])
def test_thread_count_changes_no_byte(kind):
    x_N, residual_N = (
        vector(1_000_003, kind, 7),
        residual_for(torch.empty(1_000_003), 7),
    )
    results = []
    for count in (1, 2):
        with num_threads(count):
            results.append(selected(x_N, 10_000, residual_N))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("compiled")
def test_lanes_may_select_at_the_same_time():
    vectors = [
        vector(200_003, kind, 3)
        for kind in ("normal", "ties", "one loud layer", "zeros")
    ]
    alone = [selected(x_N, 2_000) for x_N in vectors]
    with ThreadPoolExecutor(max_workers=4) as lanes:
        together = list(lanes.map(lambda x_N: selected(x_N, 2_000), vectors * 3))
    for got, want in zip(together, alone * 3, strict=True):
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])


def selected_ranges(c_N, starts, stops, ks, firsts=None):
    indices_K = torch.full((sum(ks),), -1, dtype=torch.int32)
    values_K = torch.full((sum(ks),), 7.0, dtype=c_N.dtype)
    starts_L, stops_L, ks_L, firsts_L = (
        torch.tensor(table, dtype=torch.int64)
        for table in (starts, stops, ks, firsts or starts)
    )
    topk_ranges(c_N, starts_L, stops_L, ks_L, indices_K, values_K, firsts_L)
    return indices_K, values_K


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@each("kind, threads", [("normal", 1), ("ties", 2), ("not finite", 2)])
def test_topk_of_ranges_is_topk_of_each(kind, threads):
    """Short ones and long ones, empty ones, some of which nothing is asked, gaps
    between them.
    """
    c_N = vector(1_300_000, kind, 5)
    starts = [0, 100, 100, 5_000, 6_000, 1_200_000]
    stops = [100, 100, 4_000, 6_000, 1_150_000, 1_300_000]
    ks = [1, 0, 39, 1_000, 11_440, 0]
    with num_threads(threads):
        indices_K, values_K = selected_ranges(c_N, starts, stops, ks)
    done = 0
    for start, stop, k in zip(starts, stops, ks, strict=True):
        with reference_only():
            want_K, want_values_K, _ = selected(c_N[start:stop], k)
        assert torch.equal(indices_K[done : done + k], want_K + start)
        assert same_bits(values_K[done : done + k], want_values_K)
        done += k


@pytest.mark.usefixtures("compiled")
@each("kind", ["normal", "ties", "mostly zeros", "not finite", "all equal"])
def test_short_ranges_and_dense_ones_are_the_reference(kind):
    """Of few elements, and of some blocks of which about all, or half, is selected."""
    for length in (1, 2, 15, 64, 65, 500, 4_000, 16_384, 40_000):
        c_N = vector(length, kind, length)
        for k in {1, length // 9, length // 2, length - 1, length} - {0}:
            indices_K, values_K = selected_ranges(c_N, [0], [length], [k])
            with reference_only():
                want_K, want_values_K, _ = selected(c_N, k)
            assert torch.equal(indices_K, want_K)
            assert same_bits(values_K, want_values_K)


@pytest.mark.usefixtures("compiled")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    numel=st.integers(1, 70_000),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 0.3]),
    ascending=st.booleans(),
)
def test_scatter_add_is_the_reference(numel, seed, scale, ascending):
    random = torch.Generator().manual_seed(seed)
    indices_K = torch.randperm(numel, generator=random, dtype=torch.int32)[: numel // 2]
    if ascending:
        indices_K = indices_K.sort().values
    values_K = vector(indices_K.numel(), "normal", seed)
    got_N, want_N = vector(numel, "normal", seed + 1), vector(numel, "normal", seed + 1)
    select.scatter_add(indices_K, values_K, got_N, scale)
    with reference_only():
        select.scatter_add(indices_K, values_K, want_N, scale)
    assert same_bits(got_N, want_N)


@settings(max_examples=10)
@given(
    numel=st.sampled_from([1, 6, 7, 3_000, 200_001]),
    width=st.sampled_from([2, 7, 64, 40_000]),
    scale=st.sampled_from([1.0, 0.3]),
    ascending=st.booleans(),
)
def test_units_are_added_as_by_the_reference(numel, width, scale, ascending):
    random = torch.Generator().manual_seed(numel)
    num_units = -(-numel // width)
    indices_K = torch.randperm(num_units, generator=random, dtype=torch.int32)
    # now and then the last one, which may be short
    indices_K = indices_K[: num_units // 2 + 1]
    if ascending:
        indices_K = indices_K.sort().values
    values = vector(indices_K.numel() * width, "normal", numel)
    got_N, want_N = vector(numel, "normal", 1), vector(numel, "normal", 1)
    select.scatter_add(indices_K, values, got_N, scale, width)
    with reference_only():
        select.scatter_add(indices_K, values, want_N, scale, width)
    assert same_bits(got_N, want_N)
    assert not torch.equal(got_N, vector(numel, "normal", 1))
    with pytest.raises(
        InvalidSetting, match=rf"indices_K\[0\] must lie in \[0, {num_units}\)"
    ):
        select.scatter_add(
            torch.tensor([num_units], dtype=torch.int32),
            torch.ones(width),
            got_N,
            scale,
            width,
        )
    assert same_bits(got_N, want_N)


@each("forced", [False, True])
def test_scatter_add_sums_repeated_indices_and_refuses_wrong_ones(forced):
    context = reference_only() if forced else num_threads(2)
    with context:
        out_N = torch.zeros(4)
        values = torch.tensor([1.0, 2.0, 4.0])
        select.scatter_add(torch.tensor([3, 3, 0], dtype=torch.int32), values, out_N)
        assert out_N.tolist() == [4.0, 0.0, 0.0, 3.0]
        for wrong in (4, -1):
            with pytest.raises(
                InvalidSetting, match=rf"indices_K\[1\] must lie in .* got {wrong}"
            ):
                select.scatter_add(
                    torch.tensor([0, wrong, 1], dtype=torch.int32), values, out_N
                )
        assert out_N.tolist() == [4.0, 0.0, 0.0, 3.0]


@pytest.mark.usefixtures("compiled")
@each("threads", [1, 2])
@each("forced", [False, True])
def test_many_vectors_in_one_call_are_each_as_alone(forced, threads):
    """Short ones, an empty one, one longer than all others together; with a residual or
    without.
    """
    lengths = (300, 0, 1, 70_000, 1_200_000, 5)
    vectors = [vector(numel, "normal", seed) for seed, numel in enumerate(lengths)]
    residuals = [
        residual_for(x_N, 7) if i % 3 else None for i, x_N in enumerate(vectors)
    ]
    counts = [min(len(x_N), 1 + len(x_N) // 50) for x_N in vectors]
    want = [selected(*own) for own in zip(vectors, counts, residuals, strict=True)]
    indices = [torch.full((k,), -1, dtype=torch.int32) for k in counts]
    values = [torch.full((k,), 7.0) for k in counts]
    with reference_only() if forced else num_threads(threads):
        select.topk_many(vectors, indices, values, residuals)
    for own, want_part in zip(
        zip(indices, values, residuals, strict=True), want, strict=True
    ):
        for got_N, want_N in zip(own, want_part, strict=True):
            assert (got_N is None and want_N is None) or same_bits(got_N, want_N)
