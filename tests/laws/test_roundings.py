"""Dense means are rounded twice among 2 to 128 ranks; a sum in 16 bits is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.collective.allreduce import allreduce
from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.cast16 import cast16
from gradwire.compress.none import none
from gradwire.contract import Exchange
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.pair import pair
from gradwire.exchange.two_level import on_hosts
from gradwire_lab.errors import LawBroken
from gradwire_lab.laws.cases import Case
from gradwire_lab.laws.roundings import LAWS, UP_TO_128_RANKS
from tests.each import each
from tests.laws.broken_collectives import sums_in_16_bits
from tests.laws.cases import name_of

(law,) = LAWS
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CODECS = (none(), cast16(), cast16(dtype=torch.float16))


*UP_TO_33, OF_128 = UP_TO_128_RANKS
"""128 ranks take seconds in one process."""
IN_ROUNDS = Case(world=3, numel=13_001, seed=3)
"""Chunks so large that ``allreduce`` sends them to one rank after another."""


@each("codec", CODECS, ids=name_of)
def test_a_mean_is_rounded_twice_among_any_number_of_ranks(
    codec: none | cast16,
) -> None:
    for dtype in DTYPES:
        for case in UP_TO_33:
            assert law(pair(codec, allreduce()), replace(case, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each("codec", CODECS, ids=name_of)
def test_so_it_is_among_128_ranks_in_every_dtype(
    codec: none | cast16, dtype: torch.dtype
) -> None:
    assert law(pair(codec, allreduce()), replace(OF_128, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_so_it_is_where_large_chunks_go_in_rounds(dtype: torch.dtype) -> None:
    assert law(pair(cast16(), allreduce()), replace(IN_ROUNDS, dtype=dtype))


SERVED = [pair(codec, casync_ps(partitions=p)) for codec in CODECS for p in (None, 2)]


@each("exchange", SERVED, ids=name_of)
def test_so_it_is_where_chunks_have_servers(exchange: Exchange) -> None:
    for turn, case in enumerate(UP_TO_33[:5]):
        assert law(exchange, replace(case, dtype=DTYPES[turn % 4]))


@each(
    "codec, dtype",
    [(none(), torch.bfloat16), (none(), torch.float16), (cast16(), torch.float32)],
)
def test_so_it_is_on_hosts_of_several_ranks(
    codec: none | cast16, dtype: torch.dtype
) -> None:
    for case in UP_TO_33:
        if case.world in (4, 8, 16):
            exchange = on_hosts(exchange_for(pair(codec, allreduce())), 2)
            assert law(exchange, replace(case, dtype=dtype))


def test_a_sum_in_16_bits_is_rejected() -> None:
    for codec, dtype in ((cast16(), torch.float32), (none(), torch.bfloat16)):
        with pytest.raises(LawBroken, match="a mean is off by"):
            law(pair(codec, sums_in_16_bits()), replace(UP_TO_33[-1], dtype=dtype))
