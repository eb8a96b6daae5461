"""A pair is made where traits meet needs, and is refused with help elsewhere."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from gradwire.contract import Compressor
from gradwire.contract.collective import Collective
from gradwire.contract.registry import examples, load, names
from gradwire.errors import IncompatiblePair
from gradwire.exchange.pair import pair, suited
from gradwire_lab.laws.cases import EVERY_WORLD_AND_SIZE
from gradwire_lab.laws.collectives import law_equals_the_dense_mean
from tests.each import each
from tests.laws.cases import compressors, name_of, pairs

EXACT = [made for made in pairs() if made.codec.traits.lossless]


@pytest.mark.parametrize("place", range(len(EXACT)), ids=lambda at: name_of(EXACT[at]))
def test_dense_mean_for_every_world_and_size(place: int) -> None:
    """Each in a third of the cases: three exchanges after one another see all."""
    for case in EVERY_WORLD_AND_SIZE[place % 3 :: 3]:
        law_equals_the_dense_mean(EXACT[place], case)


@each("codec, collective", product(compressors(), examples("collective")))
def test_pair_decides_by_traits(codec: Compressor, collective: Collective) -> None:
    """A pair is refused exactly when traits miss a need, and the refusal helps."""
    refusal = collective.needs.refusal(codec.traits)
    if refusal is None:
        assert pair(codec, collective).collective is collective
        return
    with pytest.raises(IncompatiblePair) as caught:
        pair(codec, collective)
    message = str(caught.value)
    assert repr(codec) in message
    assert repr(collective) in message
    assert refusal in message
    assert f"use {type(suited(codec)).__name__}()" in message


def test_every_codec_has_a_collective_and_every_collective_a_codec() -> None:
    for codec in compressors():
        assert pair(codec, suited(codec)).codec is codec
    for collective in examples("collective"):
        assert any(made.collective == collective for made in pairs()), collective


ALGORITHM = ("Source:", "Differences", "Wire:", "State:", "Contributed:")
PLANNER = ("{name}: ", "Source:", "Differences from the paper:", "Settings:", "Order:")


@each(
    "kind, headings",
    [("compress", ALGORITHM), ("collective", ALGORITHM), ("planner", PLANNER)],
)
def test_a_files_docstring_has_the_fields_of_its_kind(kind: str, headings: Any) -> None:
    for name in names(kind):
        text = __import__(load(kind, name).__module__, fromlist=["_"]).__doc__
        for heading in headings:
            assert heading.format(name=name) in text, (
                f"{kind}/{name}.py does not state {heading}"
            )
