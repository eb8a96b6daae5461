"""Every collective, with every compressor that it takes, keeps every law."""

from __future__ import annotations

from itertools import product

import pytest

from gradwire.contract import Compressor
from gradwire.contract.collective import Collective
from gradwire.contract.registry import examples
from gradwire.errors import IncompatiblePair
from gradwire.exchange.pair import Pair, pair, suited
from gradwire_lab.laws.cases import EVERY_WORLD_AND_SIZE
from gradwire_lab.laws.collectives import LAWS, law_equals_the_dense_mean
from tests.laws.cases import ALWAYS, compressors, kind_of, name_of, pairs, rotated

EXACT = [made for made in pairs() if made.codec.traits.lossless]


OF_A_KIND = {kind_of(exchange): place for place, exchange in enumerate(pairs())}.values()


@pytest.mark.parametrize("place", range(len(pairs())), ids=lambda at: name_of(pairs()[at]))
def test_laws(place: int) -> None:
    """All laws for one of each kind; with other settings half of them, and all in a slow test."""
    for number, law in enumerate(LAWS):
        if place in OF_A_KIND or (place + number) % 2:
            law(pairs()[place], rotated(place + number))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", pairs(), ids=name_of)
def test_all_laws_with_one_case(exchange: Pair) -> None:
    for law in LAWS:
        law(exchange, ALWAYS)


@pytest.mark.parametrize("exchange", EXACT, ids=name_of)
def test_dense_mean_for_every_world_and_size(exchange: Pair) -> None:
    for case in EVERY_WORLD_AND_SIZE:
        law_equals_the_dense_mean(exchange, case)


@pytest.mark.parametrize(
    ("codec", "collective"), [*product(compressors(), examples("collective"))], ids=repr
)
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


@pytest.mark.parametrize("codec", compressors(), ids=repr)
def test_suited_collective_takes_the_codec(codec: Compressor) -> None:
    assert pair(codec, suited(codec)).codec is codec


@pytest.mark.parametrize("collective", examples("collective"), ids=repr)
def test_every_collective_takes_some_codec(collective: Collective) -> None:
    assert any(made.collective == collective for made in pairs())


@pytest.mark.parametrize("collective", examples("collective"), ids=repr)
def test_header_fields(collective: Collective) -> None:
    text = __import__(type(collective).__module__, fromlist=["_"]).__doc__
    for heading in ("Source:", "Differences", "Wire:", "State:", "Contributed:"):
        assert heading in text, f"{type(collective).__module__} does not state {heading}"
