"""Means that differ between ranks are noticed, and the odd rank is named on all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.bench.accidents import Accident
from gradwire.bench.faults_judge import judge
from gradwire.bench.faults_rank import DDP, HOSTS, OVERLAP
from gradwire.bench.faults_trial import Trials
from gradwire.bench.striking import flip
from gradwire.contract import Exchange
from gradwire.errors import InvalidSetting
from gradwire.runtime.integrity import digest_of, odd_ranks
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    DENSE,
    SMALL_MB,
    TOPK,
    Net,
    digest,
    momentum,
    train,
)

VICTIM = 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_is_of_the_bits_wherever_they_lie(dtype: torch.dtype) -> None:
    values = torch.randn(13).to(dtype)
    within = torch.zeros(16, dtype=dtype)[1:14].copy_(values)
    assert digest_of(within) == digest_of(values)
    for place in range(16 * values.element_size() // 2):
        flip(within, place / (16 * values.element_size() // 2))
        assert digest_of(within) != digest_of(values), place
        flip(within, place / (16 * values.element_size() // 2))


@pytest.mark.parametrize(
    ("told", "odd"),
    [
        ([[1], [1], [2]], (2,)),
        ([[1, 2], [1, 3], [1, 2], [1, 2]], (1,)),
        ([[1], [2], [3], [1], [1]], (1, 2)),
        ([[1], [2]], ()),
        ([[1], [1], [2], [2]], ()),
    ],
)
def test_most_ranks_are_right(told: list[list[int]], odd: tuple[int, ...]) -> None:
    assert odd_ranks(told) == odd


def trained(rank: int, world: int, exchange: Exchange, every: int | None) -> str:
    net = Net()
    handle = gw.attach(net, exchange, bucket_cap_mb=SMALL_MB, check_every=every)
    train(net, momentum(net.parameters()), rank, range(2))
    handle.detach()
    return digest(net)


def rows(rank: int, world: int) -> int:
    table = nn.Embedding(50, 4, sparse=True)
    gw.attach(table, "none", check_every=1)
    table(torch.tensor([rank, 7])).sum().backward()
    assert table.weight.grad is not None
    return int(table.weight.grad._nnz())


@pytest.mark.multi
def test_checks_change_no_bit(two: Ranks) -> None:
    for exchange in (DENSE, TOPK):
        assert two.run(trained, exchange, 1) == two.run(trained, exchange, None)
    assert two.run(rows) == [3, 3]


@pytest.mark.multi
@pytest.mark.slow
def test_a_flipped_bit_of_one_rank_is_named_on_all() -> None:
    ways = ("plain", DDP, OVERLAP, "allgather_sparse")
    place = (VICTIM,), "verb", "after", 3, 0.5, 0.99, 0.8, 5.0, 1
    drawn = [Accident(0, way, "flip received", *place) for way in ways]
    drawn.append(Accident(0, HOSTS, "straggle", *place))
    with Trials() as trials, ThreadPoolExecutor() as pool:
        for one, found in zip(drawn, pool.map(trials.observe, drawn), strict=True):
            assert judge(one, found).wrong == {}, (one.way, found)
            named = {ending and ending.ranks for ending in found.endings}
            assert named == {() if one.way == HOSTS else (VICTIM,)}, (one.way, found)


def test_a_check_in_no_step_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="check_every"):
        gw.attach(Net(), "none", check_every=0)
