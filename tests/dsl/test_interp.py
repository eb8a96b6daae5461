"""The definition itself, against plain torch; and the random numbers, against published
vectors.
"""

from __future__ import annotations

import torch

from gradwire.dsl.language import (
    add,
    concat,
    extract,
    filter,
    greater,
    map,
    reduce,
    size,
    uint1,
)
from gradwire.dsl.philox import philox, uniform
from gradwire.dsl.program import Program
from gradwire.kernels.codes import packed_codes, unpacked_codes
from gradwire.kernels.libraries import reference_only
from tests.each import each


class summary(Program):
    """Sends what the reductions of a block give."""

    def encode(self, gradient):
        positive = filter(gradient, lambda x: x > 0)
        return concat(
            total=reduce(gradient, add),
            positive=reduce(positive, add),
            num_positive=size(positive),
            num_all=size(gradient),
            top=reduce(map(gradient, abs), greater),
            product=reduce(
                map(gradient, lambda x: 1 + x / 64), lambda a, b: a * b, start=1.0
            ),
            q=map(gradient, lambda x: uint1(x > 0)),
        )

    def decode(self, compressed):
        return map(extract(compressed)[-1], lambda q: q)


@each("numel", [1, 64, 100, 128, 300])
def test_reductions_are_those_of_each_block(numel):
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    with reference_only():
        payload, _ = summary(block=128).encode(None, grad_N)
    blocks = grad_N.split(128)
    positive = [block[block > 0] for block in blocks]
    want = {
        "total": [block.double().sum().float() for block in blocks],
        "positive": [part.double().sum().float() for part in positive],
        "top": [block.abs().max() for block in blocks],
        "product": [(1 + block / 64).prod() for block in blocks],
    }
    for name, values in want.items():
        torch.testing.assert_close(
            payload[name], torch.stack(values), rtol=1e-5, atol=1e-7
        )
    assert payload["num_positive"].tolist() == [len(part) for part in positive]
    assert payload["num_all"].tolist() == [len(block) for block in blocks]


@each("bits", [1, 2, 4, 8])
def test_codes_are_packed_densely_lowest_first(bits):
    codes_N = torch.arange(13, dtype=torch.int32) % 2**bits
    bytes_U = packed_codes(codes_N, bits)
    assert bytes_U.numel() == -(-13 * bits // 8)
    assert torch.equal(unpacked_codes(bytes_U, bits, 13), codes_N)
    as_one = int.from_bytes(bytes(bytes_U.tolist()), "little")
    assert as_one == sum(int(code) << bits * i for i, code in enumerate(codes_N))


@each(
    "rounds, counter, key, words",
    [
        (7, (0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (
            7,
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            "5207ddc2 45165e59 4d8ee751 8c52f662",
        ),
        (10, (0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            10,
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            7,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_philox_gives_the_published_words(rounds, counter, key, words):
    """The vectors of Random123's kat_vectors file."""
    given = tuple(torch.tensor([word]) for word in counter)
    assert " ".join(f"{int(word):08x}" for word in philox(given, key, rounds)) == words


def test_uniform_numbers_are_uniform_and_those_of_their_place():
    place_N = torch.arange(100_000)
    drawn_N = uniform(place_N, key=5, step=1, stream=0)
    assert float(drawn_N.min()) >= 0
    assert float(drawn_N.max()) < 1
    counts = torch.histc(drawn_N, bins=64, min=0, max=1)
    chi_square = float(((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum())
    assert 30 < chi_square < 110  # 63 degrees of freedom: 1e-4 and 2e-4 lie outside
    later = uniform(place_N[777:900], key=5, step=1, stream=0)
    assert torch.equal(later, drawn_N[777:900])
    for other in (
        uniform(place_N, 6, 1, 0),
        uniform(place_N, 5, 2, 0),
        uniform(place_N, 5, 1, 1),
    ):
        assert abs(float(torch.corrcoef(torch.stack([drawn_N, other]))[0, 1])) < 0.02
