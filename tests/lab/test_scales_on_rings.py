"""Payloads that vary in size and share a scale, encoded again at each hop of a ring."""

from __future__ import annotations

import pytest

from gradwire.contract import Compressor
from gradwire.errors import IncompatiblePair
from gradwire.exchange.pair import Pair, pair
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.compress.adacomp import adacomp
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.errors import LawBroken
from gradwire_lab.laws.cases import Case
from gradwire_lab.laws.growth import law_means_do_not_grow_over_ranks_and_steps
from tests.each import each

CASE = Case(world=8, numel=600, seed=8)


@each("codec", [adacomp(), adacomp(block=64), threelc(sparsity=1.75)])
def test_payloads_of_a_scale_that_vary_are_refused(codec: Compressor) -> None:
    with pytest.raises(IncompatiblePair, match="sums larger from rank to rank"):
        pair(codec, casync_ring())


def test_packed_payloads_of_a_scale_would_grow() -> None:
    codec = threelc(sparsity=1.75)
    with pytest.raises(LawBroken, match="misses"):
        law_means_do_not_grow_over_ranks_and_steps(Pair(codec, casync_ring()), CASE)
