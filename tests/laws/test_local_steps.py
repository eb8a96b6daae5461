"""Local steps keep their laws through any kind of exchange; wrong ones are rejected."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.collective.allreduce import allreduce
from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.ring import ring
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.sparseloco import sparseloco
from gradwire.compress.topk import topk
from gradwire.compress.uniform import uniform
from gradwire.contract import Exchange
from gradwire.exchange.pair import pair
from gradwire.runtime.local_steps.outer import Outer
from tests.each import each
from tests.laws.broken_local import BITES
from tests.laws.cases import name_of
from tests.laws.local_laws import LAWS

DENSE = pair(none(), ring())
EXCHANGES = (
    DENSE,
    pair(none(), allreduce()),
    pair(uniform(bitwidth=4), casync_ps()),
    pair(onebit(block=64), casync_ps()),
    pair(topk(density=0.1), casync_ps()),
    pair(sparseloco(density=0.1), allgather_sparse()),
)


@each("exchange, law", product(EXCHANGES, LAWS), ids=name_of)
def test_local_steps_keep_their_laws(exchange: Exchange, law: Callable[..., None]) -> None:
    law(Outer, exchange)


@each("law, wrong", BITES, ids=lambda one: one.__name__)
def test_wrong_ones_are_rejected(law: Callable[..., None], wrong: type[Outer]) -> None:
    with pytest.raises(AssertionError) as caught:
        law(wrong, DENSE)
    assert str(caught.value)


def test_every_law_has_a_specimen_it_must_reject() -> None:
    assert {law for law, _ in BITES} == set(LAWS)
