"""Five codes a byte, zero runs, coders of one's own: one meaning each, and no byte is
trusted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.contract.payload import Payload
from gradwire.dsl.interp import from_bytes, to_bytes
from gradwire.dsl.ir import DType
from gradwire.dsl.language import (
    Compressed,
    Vector,
    concat,
    extract,
    filter,
    indices,
    map,
    size,
    uint1,
    uint_3,
    where,
)
from gradwire.dsl.program import Program
from gradwire.errors import InvalidSetting, RanksDiffer
from gradwire.kernels.compiler import find_compiler
from gradwire.kernels.libraries import reference_only
from gradwire_lab.dsl.coders import repeat, runs
from gradwire_lab.laws.inputs import make_gradient
from gradwire_lab.laws.tolerance import same_bits
from gradwire_lab.library.zero_run import zero_run
from tests.each import each
from tests.strategies import bounded

compiled = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
BLOCK_BYTES = 26


@contextlib.contextmanager
def by(cpp: bool) -> Iterator[None]:
    """Within the block, C++ or the definition does the work."""
    with contextlib.nullcontext() if cpp else reference_only():
        assert (zero_run.library() is not None) == cpp
        yield


# ---- five codes a byte ---------------------------------------------------------------


@each("numel", [0, 1, 13, 14, 64, 65, 77, 200])
def test_codes_of_three_values_lie_five_in_a_byte(numel):
    codes_N = (torch.arange(numel) * 7919 % 3).int()
    bytes_U = to_bytes(codes_N, DType.UINT_3)
    assert bytes_U.numel() == numel // 64 * 13 + min(numel % 64, 13)
    want = [0] * bytes_U.numel()
    for place, code in enumerate(codes_N.tolist()):
        group, within = divmod(place, 64)
        want[13 * group + within % 13] += code * 3 ** (within // 13)
    assert bytes_U.tolist() == want
    assert torch.equal(from_bytes(bytes_U, DType.UINT_3, numel), codes_N)


# ---- zero runs -----------------------------------------------------------------------

BYTES = st.lists(
    st.one_of(
        st.integers(0, 242).map(lambda byte: [byte]),
        st.integers(1, 40).map(lambda n: n * [0]),
    ),
    max_size=30,
).map(
    lambda parts: torch.tensor([b for part in parts for b in part], dtype=torch.uint8)
)


def coded(plain_U: Tensor, block_bytes: int = BLOCK_BYTES) -> tuple[Tensor, Tensor]:
    """(lengths_B, coded_C) of a field; its bytes stay as they are."""
    lengths_B = torch.zeros(-(-plain_U.numel() // block_bytes), dtype=torch.int32)
    coded_C = torch.full_like(plain_U, 7)
    count = zero_run.pack(plain_U.clone(), block_bytes, lengths_B, coded_C)
    return lengths_B, coded_C[:count]


@pytest.mark.parametrize("cpp", [False, pytest.param(True, marks=compiled)])
@each(
    "plain, want",
    [
        ([0], [0]),
        ([242, 0, 1], [242, 0, 1]),
        ([7, *13 * [0], 7], [7, 254, 7]),
        (15 * [0], [255, 0]),
        ([*16 * [0], 1], [255, 243, 1]),
        ([1, *28 * [0]], [1, 255, 252, 244]),  # a run ends with its block of 26 bytes
    ],
)
def test_runs_of_zeros_are_a_byte_each(plain, want, cpp):
    with by(cpp):
        lengths_B, coded_C = coded(torch.tensor(plain, dtype=torch.uint8))
    assert coded_C.tolist() == want
    assert int(lengths_B.sum()) == len(want)


@pytest.mark.smoke
@compiled
@bounded(200)
@given(plain_U=BYTES, block_bytes=st.sampled_from([13, 26, 208, 3328]))
def test_every_field_comes_back_and_cpp_is_the_definition(plain_U, block_bytes):
    with by(cpp=True):
        lengths_B, coded_C = coded(plain_U, block_bytes)
        back_U = torch.full_like(plain_U, 9)
        assert zero_run.unpack(back_U, block_bytes, lengths_B, coded_C) == -1
    with by(cpp=False):
        reference = coded(plain_U, block_bytes)
        again_U = torch.full_like(plain_U, 9)
        assert zero_run.unpack(again_U, block_bytes, lengths_B, coded_C) == -1
    assert torch.equal(back_U, plain_U)
    assert torch.equal(again_U, plain_U)
    assert same_bits(lengths_B, reference[0])
    assert same_bits(coded_C, reference[1])
    assert coded_C.numel() <= plain_U.numel()


@compiled
@bounded(300)
@given(
    num_bytes=st.integers(1, 80),
    lengths=st.lists(st.integers(-1, 27), min_size=4, max_size=4),
    content=st.lists(st.integers(0, 255), max_size=104),
    fits=st.booleans(),
)
def test_no_bytes_make_a_decoder_write_outside_its_field(
    num_bytes, lengths, content, fits
):
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    lengths_B = torch.tensor(lengths[:num_blocks], dtype=torch.int32)
    if fits:  # get past the check of the lengths
        content = (content + 104 * [255])[: max(0, int(lengths_B.clamp(min=0).sum()))]
    coded_C = torch.tensor(content, dtype=torch.uint8)
    verdicts = []
    for cpp in (True, False):
        around = torch.full((num_bytes + 128,), 0xA5, dtype=torch.uint8)
        with by(cpp):
            field = around[64 : 64 + num_bytes]
            verdicts.append(
                zero_run.unpack(field, BLOCK_BYTES, lengths_B, coded_C) >= 0
            )
        assert bool(
            (around[:64] == 0xA5).all() & (around[64 + num_bytes :] == 0xA5).all()
        )
    assert verdicts[0] == verdicts[1]


# ---- in programs ---------------------------------------------------------------------


class signs_in_runs(Program, exact_size=False):
    """The signs of what is far from zero, in runs, behind a header."""

    def encode(self, gradient: Vector) -> Compressed:
        code = map(gradient, lambda x: uint_3(where(x > 2, 1, where(x < -2, 2, 0))))
        return concat(codes=zero_run(code), count=size(gradient))

    def decode(self, compressed: Compressed) -> Vector:
        return map(extract(compressed)[0], lambda code: where(code == 2, -1, code))


CODEC = signs_in_runs(block=128)


@pytest.mark.parametrize("cpp", [False, pytest.param(True, marks=compiled)])
@each("place", ["lengths", "bytes"])
def test_a_damaged_payload_is_refused(place, cpp):
    payload, _ = CODEC.encode(None, make_gradient("normal", 300, torch.float32))
    damaged = Payload(payload.format, payload.buffer.clone())
    if place == "lengths":
        damaged["codes_lengths"][1] += 1
    else:
        damaged["codes"].fill_(255)
    with (
        by(cpp),
        pytest.raises(RanksDiffer, match=r"field codes .* zero_run .* same gradwire"),
    ):
        CODEC.decode(damaged, torch.empty(300))


def attempt(encode: Any, **traits: Any) -> Program:
    def decode(self: Program, compressed: Compressed) -> Vector:
        return map(extract(compressed)[0], lambda code: code * 1.0)

    return type("attempt", (Program,), {"encode": encode, "decode": decode}, **traits)()


def ones(gradient: Vector) -> Vector:
    return map(gradient, lambda x: uint_3(x > 0))


REFUSED = {
    "floats": (lambda self, g: concat(q=zero_run(g)), "convert its elements to uint_3"),
    "a selection": (
        lambda self, g: concat(q=zero_run(filter(ones(g), lambda x: x == 1))),
        "map first",
    ),
    "mapped": (
        lambda self, g: concat(q=map(zero_run(ones(g)), uint1)),
        "takes a vector first",
    ),
    "two": (
        lambda self, g: concat(q=zero_run(ones(g)), r=zero_run(ones(g))),
        "code one of them",
    ),
    "beside kept ones": (
        lambda self, g: concat(
            q=zero_run(ones(g)), i=indices(filter(g, lambda x: x > 0))
        ),
        "send either",
    ),
    "runs": (
        lambda self, g: concat(q=map(runs(g, 0, 14), lambda byte, n: byte)),
        r"zero_run\(v\)",
    ),
    "repeat": (lambda self, g: repeat(g, g), r"zero_run\(v\)"),
}


@each("case", REFUSED)
def test_what_cannot_be_coded_is_refused_with_the_line(case):
    encode, remedy = REFUSED[case]
    with pytest.raises(InvalidSetting, match=remedy) as caught:
        attempt(encode, exact_size=False)
    assert str(caught.value).startswith(__file__)
