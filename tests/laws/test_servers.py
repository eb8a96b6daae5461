"""Servers that hold no model keep the laws; wrong ones are rejected."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.cast16 import cast16
from gradwire.compress.none import none
from gradwire.compress.nonzero import nonzero
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract.spec import TensorSpec
from gradwire.errors import InvalidSetting
from gradwire.exchange.pair import pair
from gradwire.exchange.without_data import wire_bytes
from gradwire_lab.compress.lossless import lossless
from gradwire_lab.compress.qsgd import qsgd
from tests.each import each, sampled
from tests.laws.servers_laws import (
    LAWS,
    Served,
    law_nothing_is_lost_or_made,
    law_servers_gradients_are_not_read,
    law_the_mean_is_over_workers,
    law_workers_and_servers_meet_only_each_other,
    law_workers_hold_the_same_bits,
    wrong,
)

CODECS = (none(), onebit(), cast16(), topk(density=0.1), qsgd(block=64), nonzero())
KINDS = ("normal", "wide", "spike", "lognormal", "few values", "zeros")
SIZES = (200, 1, 9, 1000)
"""One element has one server; the other servers have empty chunks."""
CASES = [
    Served(
        workers=workers,
        servers=servers,
        codec=CODECS[number % len(CODECS)],
        partitions=(None, 1, servers)[number % 3],
        in_rounds=number % 2 == 1,
        numel=SIZES[number % len(SIZES)],
        kind=KINDS[number // 2 % len(KINDS)],
        seed=number,
    )
    for number, (workers, servers, _) in enumerate(
        product(range(1, 8), range(1, 4), range(2))
    )
]
NARROW = [
    Served(workers=3, servers=2, codec=codec, dtype=dtype, in_rounds=is_in_rounds)
    for codec in (none(), onebit(), lossless())
    for dtype in (torch.bfloat16, torch.float16, torch.float64)
    for is_in_rounds in (False, True)
]


@sampled("cases", [*CASES, *NARROW], every=5)
@each("law", LAWS)
def test_workers_and_servers_of_every_number_keep_the_laws(
    law: Any, cases: list[Served]
) -> None:
    for case in cases:
        law(case)


@each("partitions, turns", [(1, [4, 5, 6, 7, 4]), (2, [4, 6, 4]), (3, [4, 5, 5])])
def test_servers_take_turns_if_partitions_are_fewer(
    partitions: int, turns: list[int]
) -> None:
    served = Served(workers=4, servers=4, codec=onebit(), partitions=partitions)
    for order, first in enumerate(turns):
        sent = served.sent_bytes(order)
        busy = [rank for rank, size in enumerate(sent) if rank > 3 and size]
        assert busy == [*range(first, first + partitions)]


BITES = [
    (law_the_mean_is_over_workers, "counts servers in the mean", none()),
    (law_servers_gradients_are_not_read, "reads a server's gradient", none()),
    (law_workers_hold_the_same_bits, "one worker has other bits", onebit()),
    (law_nothing_is_lost_or_made, "drops what the mean lost", onebit()),
    (
        law_workers_and_servers_meet_only_each_other,
        "sends workers' parts to workers",
        onebit(),
    ),
]


@each("law, fault, codec", BITES, ids=str)
def test_wrong_ones_are_rejected(
    law: Callable[..., Any], fault: str, codec: Any
) -> None:
    right = Served(workers=3, servers=2, codec=codec, kind="lognormal")
    law(right)
    with pytest.raises(AssertionError) as caught:
        law(
            Served(
                workers=3, servers=2, codec=codec, kind="lognormal", wrong=wrong(fault)
            )
        )
    assert str(caught.value)


def test_every_law_has_a_specimen_it_must_reject() -> None:
    assert {law for law, _, _ in BITES} == set(LAWS)


@each("workers, servers", [(4, 1), (4, 2), (6, 3)])
def test_bytes_are_those_of_the_page(workers: int, servers: int) -> None:
    """A worker pushes the whole message; a server sends its part to each worker."""
    numel = 64 * servers
    for room_bytes in (0, 2**19):
        exchange = pair(none(), casync_ps(servers=servers, room_bytes=room_bytes))
        sent = wire_bytes(exchange, TensorSpec("", numel), workers + servers)
        assert sent == [4 * numel] * workers + [4 * 64 * workers] * servers


def test_more_servers_or_partitions_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="fewer than 2 ranks"):
        pair(none(), casync_ps(servers=2)).init(TensorSpec("", 10), 2)
    few = pair(none(), casync_ps(servers=2, partitions=3))
    with pytest.raises(InvalidSetting, match="no fewer than partitions"):
        few.init(TensorSpec("", 10), 5)
    with pytest.raises(InvalidSetting, match="servers"):
        casync_ps(servers=0)
