"""Schemes for sparse gradients lose nothing, say what they send, and are as balanced as told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given

from gradwire.collective.zen import zen
from gradwire.compress.nonzero import nonzero
from gradwire.contract.collective import Collective
from gradwire.contract.registry import examples
from gradwire.exchange.by_name import run_local
from gradwire.exchange.pair import Pair, pair
from gradwire_lab.collective.omnireduce import omnireduce
from gradwire_lab.collective.sparse_ps import sparse_ps
from tests.each import each
from tests.laws.broken_sparse import BITES
from tests.laws.cases import name_of
from tests.laws.sparse_laws import (
    EACH_KIND,
    LAWS,
    Held,
    holdings,
    imbalance,
    imbalance_bound,
    law_parts_are_balanced,
)
from tests.strategies import bounded

SCHEMES = (
    *(pair(nonzero(), one) for one in examples("collective") if one.dimensions is not None),
    pair(nonzero(), omnireduce(block=3)),
)


@pytest.mark.parametrize("exchange", SCHEMES, ids=name_of)
def test_laws(exchange: Pair) -> None:
    @bounded(4)
    @given(held=holdings)
    def hold(held: Held) -> None:
        for law in LAWS:
            law(exchange, held)

    for held in EACH_KIND:
        for law in LAWS:
            law(exchange, held)
    hold()


@each("law, exchange", BITES, ids=lambda p: getattr(p, "__name__", ""))
def test_law_bites(law: Callable[..., None], exchange: Pair) -> None:
    def all_kinds() -> None:
        for held in (*EACH_KIND, LOPSIDED):
            law(exchange, held)

    with pytest.raises(AssertionError):
        all_kinds()


def test_every_law_has_a_specimen() -> None:
    assert {law for law, _ in BITES} == set(LAWS)


LOPSIDED = Held(world=8, numel=20_000, kinds=("dense start",))


@each("kinds", [("dense start",), ("one range",), ("one range", "any")])
def test_a_hash_balances_what_ranges_do_not(kinds: tuple[str, ...]) -> None:
    """Theorem 2's bound holds on skewed and adversarial sets, and no range keeps it."""
    held = Held(world=8, numel=20_000, kinds=kinds)
    for seed in range(3):
        law_parts_are_balanced(pair(nonzero(), zen(seed=seed)), held)
    fewest = min(map(len, held.sets()))
    ranged = imbalance(pair(nonzero(), sparse_ps()), held)
    assert ranged is not None
    assert ranged[0] > 2 * imbalance_bound(8, fewest), f"{ranged} is nearly balanced"


def test_the_papers_table_3() -> None:
    """Balanced Parallelism alone is point-to-point, incremental, parallel and balanced."""
    told: dict[str, tuple[object, ...]] = {
        type(one).__name__: one.dimensions
        for one in examples("collective")
        if one.dimensions is not None
    }
    assert told == {
        "allgather_sparse": ("ring", "one-shot", "centralization", None),
        "sparcml": ("hierarchy", "incremental", "centralization", None),
        "omnireduce": ("point-to-point", "one-shot", "parallelism", "imbalanced"),
        "sparse_ps": ("point-to-point", "incremental", "parallelism", "imbalanced"),
        "sparse_ps_broadcast": ("point-to-point", "incremental", "parallelism", "imbalanced"),
        "zen": ("point-to-point", "incremental", "parallelism", "balanced"),
    }


@each("scheme", [one.collective for one in SCHEMES])
def test_rows_travel_whole(scheme: Collective) -> None:
    """Rows of 5 that are shared by nobody, some or all; 33 rows and 3 elements more."""
    draw = torch.Generator().manual_seed(3)
    exchange = pair(nonzero(width=5), scheme)
    rows_WR = torch.rand(4, 34, generator=draw) < 0.3
    grads = [
        (rows_R.repeat_interleave(5)[:168] * torch.randn(168, generator=draw)).double()
        for rows_R in rows_WR
    ]
    want_N = torch.stack(grads).mean(0)
    for mean_N, _, _ in run_local(exchange, grads):
        assert torch.allclose(mean_N, want_N, rtol=0, atol=1e-15)
