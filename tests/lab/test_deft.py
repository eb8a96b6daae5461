"""deft: algorithms 2 to 5 of its paper, who owns what, and its density among many
ranks.

What it has in common with others is in ``test_support.py``.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradwire as gw
from gradwire.contract import Member
from gradwire.errors import RanksDiffer
from gradwire.exchange.by_name import exchange_for
from gradwire_lab.compress._narrow import narrow, widen, width_of
from gradwire_lab.compress.deft import (
    ALLOCATIONS,
    Allocation,
    Partition,
    layer_k,
    owners,
    pack,
    partition_of,
    printed_layer_k,
    printed_owners,
    printed_work,
    select_layers,
    two_stage,
)
from gradwire_lab.compress.deft import loads as loads_of
from tests.compress.test_support import MODEL, draw, spec_of
from tests.each import each
from tests.run import Run
from tests.strategies import bounded

# ---- its parts -----------------------------------------------------------------------

sizes_of_tensors = st.lists(st.integers(0, 200), min_size=0, max_size=12)
layer_sizes = st.lists(st.integers(1, 300), min_size=1, max_size=20)
norms_of = st.floats(0, 1e6) | st.sampled_from(
    [0.0, 1e-300, 1.0, float("inf"), float("nan")]
)


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def partitioned_by_the_paper(tensors: list[int], world: int) -> list[tuple[int, int]]:
    """Algorithm 2 as printed: (st_layer, end_layer) of each layer."""
    layers, alloc_pos = [], 0
    for size in tensors:
        quotient, remainder = divmod(size, world)
        fractions = [quotient + (i < remainder) for i in range(world)]
        for size_layer in fractions if size > sum(tensors) / world else [size]:
            layers.append((alloc_pos, alloc_pos + size_layer))
            alloc_pos += size_layer
    return layers


@bounded(60)
@given(tensors=sizes_of_tensors, world=st.integers(1, 9))
def test_layers_cover_every_element_and_none_is_above_its_share(
    tensors: list[int], world: int
) -> None:
    """Algorithm 2, but for layers of no element."""
    layers, numel = Partition(two_stage(tensors, world)), sum(tensors)
    got = [*zip(layers.starts_L.tolist(), layers.stops_L.tolist(), strict=True)]
    assert got == [(a, b) for a, b in partitioned_by_the_paper(tensors, world) if a < b]
    assert sum(layers.sizes) == numel
    assert all(0 < size <= -(-numel // world) for size in layers.sizes)


@bounded(100)
@given(data=st.data(), sizes=layer_sizes, density=st.floats(0.001, 1.0))
def test_the_sum_of_k_is_the_budget(
    data: st.DataObject, sizes: list[int], density: float
) -> None:
    """Exactly max(budget, L), unless all layers with a norm are sent whole; k in [1,
    size].
    """
    norms = data.draw(st.lists(norms_of, min_size=len(sizes), max_size=len(sizes)))
    budget = max(1, round(density * sum(sizes)))
    norms_L, sizes_L = float64(norms), torch.tensor(sizes)
    k_L = layer_k(norms_L, sizes_L, budget)
    assert bool((k_L >= 1).all())
    assert bool((k_L <= sizes_L).all())
    wanted, got = max(budget, len(sizes)), int(k_L.sum())
    assert got <= wanted
    largest = float(norms_L.where(norms_L.isfinite(), 0.0).max())
    is_seen_L = (norms_L > 1e-199 * largest) | ~norms_L.isfinite()
    assert got == wanted or bool((k_L == sizes_L)[is_seen_L].all())


@each("norms", [[0.0] * 3, [float("nan")] * 3, [float("inf"), 0.0, 1.0]])
def test_norms_of_zero_or_none_still_give_each_layer_a_k(norms: list[float]) -> None:
    """Zeros send one element a layer; what is not finite counts as the largest that
    is.
    """
    k = layer_k(float64(norms), torch.tensor([50, 50, 50]), 31).tolist()
    assert k == (
        [1, 1, 1] if not any(norms) else [15, 1, 15] if 0.0 in norms else [10, 11, 10]
    )


@bounded(100)
@given(data=st.data(), sizes=layer_sizes, density=st.floats(0.001, 1.0))
def test_printed_k_is_algorithm_3_line_by_line(
    data: st.DataObject, sizes: list[int], density: float
) -> None:
    norms = data.draw(
        st.lists(st.floats(0, 1e6), min_size=len(sizes), max_size=len(sizes))
    )
    budget = max(1, round(density * sum(sizes)))
    got = printed_layer_k(float64(norms), torch.tensor(sizes), budget).tolist()
    exact = [Fraction(norm) for norm in norms]
    k_remain, norm_remain = Fraction(budget), sum(exact)
    for layer in sorted(range(len(sizes)), key=lambda one: -norms[one]):
        k_temp = k_remain * exact[layer] / norm_remain if norm_remain > 0 else 0
        k = sizes[layer] if sizes[layer] < k_temp else max(1, int(k_temp))
        # a share may be a whole number but for rounding
        assert abs(got[layer] - k) <= (abs(k_temp - round(k_temp)) < 1e-6)
        k_remain -= got[layer]
        norm_remain -= exact[layer]
    assert all(1 <= k <= size for k, size in zip(got, sizes, strict=True))
    # layers below one element may overspend, by one each
    assert sum(got) <= budget + len(sizes)


def test_printed_costs_give_layers_of_one_element_to_the_lightest_bin() -> None:
    """Equation 3 says 0 for them, so they are all one rank's; sent whole, layers have
    owners too.
    """
    layers = Partition((50, 40, 7, 60))
    k_L = torch.tensor([10, 1, 7, 1])
    costs = printed_work(layers.sizes_L, k_L)
    assert costs == pytest.approx([115.129, 0.0, 13.621, 0.0], abs=1e-3)
    assert printed_owners(layers, k_L, 3, 0).tolist() == [0, 2, 1, 2]
    assert printed_owners(layers, k_L, 3, 2).tolist() == [1, 0, 2, 0]


costs_of = st.lists(st.integers(0, 9).map(float), min_size=0, max_size=20)


@bounded(60)
@given(costs=costs_of, num_bins=st.integers(1, 9))
def test_bin_packing_is_the_papers_and_within_grahams_bound(
    costs: list[float], num_bins: int
) -> None:
    got, size_bin = pack(costs, num_bins), [0.0] * num_bins
    left = list(costs)
    for _ in costs:  # algorithm 4, lines 9 to 15
        item = left.index(max(left))
        lightest = size_bin.index(min(size_bin))
        assert got[item] == lightest
        size_bin[lightest] += costs[item]
        left[item] = -1.0
    loads = loads_of(costs, got, num_bins)
    assert loads == size_bin
    mean, top = sum(costs) / num_bins, max(costs, default=0.0)
    assert max(loads, default=0.0) <= (mean + (1 - 1 / num_bins) * top) * (1 + 1e-9)


@bounded(60)
@given(
    data=st.data(),
    tensors=sizes_of_tensors,
    world=st.integers(2, 9),
    delegate=st.integers(0, 8),
    density=st.sampled_from([0.01, 0.3, 1.0]),
)
def test_parts_are_disjoint_and_their_union_comes_back(
    data: st.DataObject, tensors: list[int], world: int, delegate: int, density: float
) -> None:
    """Each rank selects in its part by k of its own; what arrives is all of that, in
    order.
    """
    layers = partition_of(tuple(tensors), world)
    numel, num_layers = sum(tensors), len(layers.sizes)
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    grads = [torch.randn(numel, generator=draw) for _ in range(world)]
    budget = max(1, round(density * numel))
    own_k = [
        layer_k(torch.rand(num_layers, generator=draw).double(), layers.sizes_L, budget)
        for _ in range(world)
    ]
    owners_L = owners(layers, own_k[delegate % world], world, delegate % world)
    allocation = Allocation(layers, owners_L, world)
    listed = [
        layer for rank in range(world) for layer in allocation.layers[rank].tolist()
    ]
    is_common_L = own_k[delegate % world] == layers.sizes_L
    assert sorted([*listed, *is_common_L.nonzero().flatten().tolist()]) == [
        *range(num_layers)
    ]
    assert sum(allocation.part_sizes) + allocation.num_common == numel

    places, expected = [], []
    for rank in range(world):
        me, mine = Member(rank, world), allocation.layers[rank]
        expected += select_layers(
            me, grads[rank], layers, mine, own_k[rank][mine]
        ).tolist()
        firsts_P = allocation.firsts_of(rank)
        indices_K = select_layers(
            me, grads[rank], layers, mine, own_k[rank][mine], firsts_P
        )
        assert all(0 <= i < allocation.part_sizes[rank] for i in indices_K.tolist())
        places.append(indices_K + allocation.first_places[rank])
    for layer in is_common_L.nonzero().flatten().tolist():
        start = int(layers.starts_L[layer])
        expected += range(start, start + layers.sizes[layer])
    places_K = torch.cat(places).int() if places else torch.zeros(0, dtype=torch.int32)
    support_K = allocation.union(Member(0, world), places_K)
    assert support_K.tolist() == sorted(expected)
    assert len(set(expected)) == len(expected)


def test_places_of_another_allocation_are_refused() -> None:
    layers = Partition((4, 4))
    allocation = Allocation(layers, torch.tensor([0, 1], dtype=torch.int32), 2)
    with pytest.raises(RanksDiffer, match="outside of their parts"):
        allocation.union(Member(0, 2), torch.tensor([1, 9], dtype=torch.int32))


def test_the_delegate_decides_what_is_common_and_turns_the_bins() -> None:
    """Saturated and one-element layers belong to nobody; the costliest goes round the
    ranks.
    """
    layers = Partition((1, 100, 5, 60, 60))
    k_L = torch.tensor([1, 10, 5, 10, 10])
    for delegate in range(3):
        got = owners(layers, k_L, 3, delegate).tolist()
        assert got == [3, -delegate % 3, 3, (1 - delegate) % 3, (2 - delegate) % 3]


@each("width", [1, 2, 3, 4])
def test_numbers_come_back_from_so_few_bytes(width: int) -> None:
    bound = min(256**width, 2**31)
    assert width_of(bound) == width
    assert width_of(256 ** (width - 1) + 1) == width
    numbers_K = (
        torch.tensor([0, 1, 255, bound // 2, bound - 1]).clamp(max=bound - 1).int()
    )
    packed = narrow(numbers_K, width, torch.empty(5 * width, dtype=torch.uint8))
    assert packed.numel() == 5 * width
    assert torch.equal(widen(packed, width, torch.full_like(numbers_K, -1)), numbers_K)


def test_an_owner_that_is_no_rank_is_refused() -> None:
    partition = partition_of((4, 4, 4), 2)
    owners_L = torch.full((len(partition.sizes),), 7, dtype=torch.int32)
    with pytest.raises(RanksDiffer, match="gives a layer to rank 7 of 2"):
        Allocation(partition, owners_L, 2)


# ---- deft as a whole -----------------------------------------------------------------

deft, topk = gw.compress.deft, gw.compress.topk


def by_the_paper(
    exchange: deft, spec: gw.TensorSpec, pending: list[Tensor], step: int
) -> list[int]:
    """The support by algorithms 2 to 5, one layer and rank after the other."""
    world = len(pending)
    rules = ALLOCATIONS[exchange.allocation]
    layers, budget = exchange.partition(spec, world), exchange.kept(spec.numel)
    parts = [torch.split(c_N, list(layers.sizes)) for c_N in pending]
    k = [
        rules.layer_k(
            torch.stack([p.double().norm() for p in own]), layers.sizes_L, budget
        )
        for own in parts
    ]
    owner = rules.owners(layers, k[step % world], world, step % world).tolist()
    support: list[int] = []
    for layer, (start, size) in enumerate(
        zip(layers.starts_L.tolist(), layers.sizes, strict=True)
    ):
        rank = owner[layer]
        if rank == world:
            chosen = torch.arange(size)
        else:
            chosen = parts[rank][layer].abs().topk(int(k[rank][layer])).indices
        support += sorted((chosen + start).tolist())
    return support


@each("world", [2, 3, 5])
@each("allocation", ALLOCATIONS)
def test_it_is_the_papers_algorithm(world: int, allocation: str) -> None:
    """Over steps, so with every rank as the delegate, and with a residual."""
    spec = spec_of(MODEL, torch.float64)
    exchange = deft(density=0.1, allocation=allocation)
    run = Run(exchange_for(exchange), spec, world)
    left = [torch.zeros(spec.numel, dtype=torch.float64) for _ in range(world)]
    for step in range(world + 1):
        grads = draw(spec, world, step)
        pending = [c_N + g_N for c_N, g_N in zip(left, grads, strict=True)]
        support = by_the_paper(exchange, spec, pending, step)
        want_N = torch.zeros(spec.numel, dtype=torch.float64)
        want_N[support] = torch.stack(pending).mean(0)[support]
        torch.testing.assert_close(run.step(grads), want_N, rtol=1e-12, atol=1e-12)
        for c_N, state in zip(pending, run.states, strict=True):
            c_N[support] = 0.0
            torch.testing.assert_close(state.residual_N, c_N, rtol=1e-12, atol=1e-12)
        left = pending


def test_sizes_of_layers_may_be_given_and_wrong_ones_are_refused() -> None:
    sizes = (30, 2, 8)
    by_sizes = Run(deft(density=0.2, layers=[*sizes]), gw.TensorSpec("flat", 40), 3)
    by_shapes = Run(deft(density=0.2), spec_of(tuple((n,) for n in sizes)), 3)
    grads = draw(gw.TensorSpec("flat", 40), 3)
    assert torch.equal(by_sizes.step(grads), by_shapes.step(grads))
    assert hash(deft(layers=[*sizes])) == hash(deft(layers=sizes))
    with pytest.raises(
        gw.InvalidSetting, match=r"sizes of 41 elements in all, as 'flat' has, got"
    ):
        deft(layers=sizes).init(gw.TensorSpec("flat", 41), 2)
    for wrong in ((-1, 41), (1.5,), (True,), "40", 40):
        with pytest.raises(
            gw.InvalidSetting, match="deft layers must be numbers of elements"
        ):
            deft(layers=wrong)  # type: ignore[arg-type]


def correlated(spec: gw.TensorSpec, world: int, seed: int) -> list[Tensor]:
    """Gradients of one model on other data: half shared, of another size in each
    layer.
    """
    layers = torch.rand(len(spec.shapes), generator=torch.Generator().manual_seed(0))
    scales_N = (100**layers).repeat_interleave(
        torch.tensor([a * b for a, b in spec.shapes])
    )
    generator = torch.Generator().manual_seed(seed)
    shared_N, *own = (
        torch.randn(spec.numel, generator=generator) for _ in range(world + 1)
    )
    return [scales_N * (shared_N + own_N) for own_N in own]


def test_the_density_stays_whatever_the_number_of_ranks_and_top_ks_grows() -> None:
    """Figure 4, in small: near what was asked for among 2 to 16 ranks, in every
    step.
    """
    density = 0.02
    spec = spec_of(((40, 50), (100, 30), (20, 20), (70, 60), (25, 8)) * 3)
    grown = []
    for world in (2, 4, 8, 16):
        mine, other = (
            Run(exchange_for(kind(density=density)), spec, world)
            for kind in (deft, topk)
        )
        for step in range(3):
            grads = correlated(spec, world, step)
            assert int(mine.step(grads).count_nonzero()) == pytest.approx(
                density * spec.numel, rel=0.04
            )
            built_up = int(other.step(grads).count_nonzero())
        grown.append(built_up / (density * spec.numel))
    assert all(a < b for a, b in pairwise(grown))
    assert grown[-1] > 3
