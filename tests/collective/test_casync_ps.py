"""CaSync-PS in rounds: computations beside what travels; its laws are held in tests/laws."""

from __future__ import annotations

from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.qsgd import qsgd
from gradwire.contract import Compressor
from gradwire.exchange.pair import pair
from gradwire_lab.compress.hardthreshold import hardthreshold
from tests.each import each
from tests.planning.simulation.test_computes import CHUNK, Done, computes

IN_ROUNDS = casync_ps(room_bytes=0)


def _alone(own: list[Done], name: str) -> float:
    """Chunks beside whose encode, merge or decode nothing travels."""
    return sum(one.numel for one in own if one.name == name and not one.is_beside) / CHUNK


@each("world", [4, 5, 8, 17])
@each("codec", [onebit(), qsgd()])
def test_only_the_first_round_is_encoded_and_the_last_decoded_alone(
    codec: Compressor, world: int
) -> None:
    """All else is encoded, merged and decoded beside a transfer, but for the mean."""
    for own in computes(pair(codec, IN_ROUNDS), world * CHUNK, world):
        assert sum(one.numel for one in own if one.name == "encode") == world * CHUNK
        assert sum(one.numel for one in own if one.name == "merge") == world * CHUNK
        assert sum(one.numel for one in own if one.name == "decode") == world * CHUNK
        alone = [_alone(own, name) for name in ("encode", "merge", "decode")]
        assert alone == [2, 1, 1]


def test_sizes_that_vary_are_told_before_anything_is_pushed() -> None:
    for own in computes(pair(hardthreshold(threshold=1.0), IN_ROUNDS), 8 * CHUNK, 8):
        assert _alone(own, "encode") == 8


def test_large_messages_go_in_rounds_by_themselves() -> None:
    """Seven payloads of 512 KiB / 7 are on their way to a rank at once, and not a byte more."""
    exchange = pair(none(), casync_ps())
    most = 512 * 1024 // 7 // 4 // 32 * 32 * 8  # elements, in 8 aligned chunks
    for numel, alone in ((most, 7), (most + 8 * 32, 1)):
        own = computes(exchange, numel, 8)[0]
        first = next(one for one in own if one.name == "encode")
        assert first.numel == numel // 8 * alone
