"""CaSync-PS in rounds: the same laws as at once, and computations beside what travels."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.steps.rounds import FEW as FEW_AT_A_TIME
from gradwire.compress.cast16 import cast16
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.qsgd import qsgd
from gradwire.compress.topk import topk
from gradwire.contract import Compressor
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.by_name import run_local
from gradwire.exchange.pair import pair
from gradwire_lab.compress.hardthreshold import hardthreshold
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.laws import many_steps
from gradwire_lab.laws.cases import FEW, Case
from gradwire_lab.laws.exchanges import LAWS
from tests.planning.clock.test_computes import CHUNK, Done, computes

CODECS = (
    none(),
    cast16(),
    onebit(block=64),
    qsgd(bitwidth=4, block=64),
    threelc(block=64),
    topk(density=0.3),
    hardthreshold(threshold=1.0, max_density=0.3),
)
IN_ROUNDS = casync_ps(room_bytes=0)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_laws_in_rounds(codec: Compressor) -> None:
    for number, law in enumerate(law for law in LAWS if law not in many_steps.LAWS):
        cases = FEW[number % len(FEW)], Case(world=5, numel=300, seed=number)
        law(pair(codec, IN_ROUNDS), cases[(CODECS.index(codec) + number) % 2])


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 7, 8])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_nothing_kept_grows_in_rounds(codec: Compressor, world: int) -> None:
    case = Case(world=world, numel=60, seed=world)
    many_steps.law_what_is_kept_does_not_grow_by_itself(pair(codec, IN_ROUNDS), case)


@pytest.mark.parametrize("world", [2, 3, 4, 9])
@pytest.mark.parametrize("codec", [none(), onebit(block=64), topk(density=0.3)], ids=repr)
def test_means_are_those_of_all_at_once(codec: Compressor, world: int) -> None:
    """Rounds add up in another order, so means differ by roundings of a sum at most."""
    grads = [_gradient(500, seed) for seed in range(world)]
    means = [
        run_local(pair(codec, collective), grads)[0][0] for collective in (casync_ps(), IN_ROUNDS)
    ]
    torch.testing.assert_close(*means)


def _gradient(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _alone(own: list[Done], name: str) -> float:
    """Chunks beside whose encode, merge or decode nothing travels."""
    return sum(one.numel for one in own if one.name == name and not one.is_beside) / CHUNK


@pytest.mark.parametrize("world", [4, 5, 8, 17])
@pytest.mark.parametrize("codec", [onebit(), qsgd()], ids=repr)
def test_only_the_first_round_is_encoded_and_the_last_decoded_alone(
    codec: Compressor, world: int
) -> None:
    """All else is encoded, merged and decoded beside a transfer, but for the mean."""
    for own in computes(pair(codec, IN_ROUNDS), world * CHUNK, world):
        assert sum(one.numel for one in own if one.name == "encode") == world * CHUNK
        assert sum(one.numel for one in own if one.name == "merge") == world * CHUNK
        assert sum(one.numel for one in own if one.name == "decode") == world * CHUNK
        alone = [_alone(own, name) for name in ("encode", "merge", "decode")]
        assert alone == [FEW_AT_A_TIME + 1, 1, 1]


def test_sizes_that_vary_are_told_before_anything_is_pushed() -> None:
    for own in computes(pair(hardthreshold(threshold=1.0), IN_ROUNDS), 8 * CHUNK, 8):
        assert _alone(own, "encode") == 8


def test_large_messages_go_in_rounds_by_themselves() -> None:
    """Seven payloads of 512 KiB / 7 are on their way to a rank at once, and not a byte more."""
    exchange = pair(none(), casync_ps())
    most = 512 * 1024 // 7 // 4 // 32 * 32 * 8  # elements, in 8 aligned chunks
    for numel, alone in ((most, 7), (most + 8 * 32, FEW_AT_A_TIME)):
        own = computes(exchange, numel, 8)[0]
        first = next(one for one in own if one.name == "encode")
        assert first.numel == numel // 8 * alone


def test_bytes_in_rounds() -> None:
    """9 elements among 3 ranks are chunks of 8, 1 and 0; a rank sends its own to the others."""
    spec = TensorSpec("bias", 9)
    pushed, pulled = [8, 32, 40], [2 * 32, 2 * 8, 0]
    expected = [push + pull for push, pull in zip(pushed, pulled, strict=True)]
    assert pair(none(), IN_ROUNDS).wire_bytes(spec, 3) == expected


def test_room_is_no_negative_number() -> None:
    with pytest.raises(gw.InvalidSetting, match="room_bytes"):
        casync_ps(room_bytes=-1)
