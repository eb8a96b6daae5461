"""Coders of one's own: what is none is refused with its line."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.dsl.language import (
    Vector,
    filter,
    map,
    uint_3,
    where,
)
from gradwire.errors import InvalidSetting
from gradwire.kernels.compiler import find_compiler
from gradwire_lab.compll_text.compile import compile_coder
from gradwire_lab.dsl.coders import Coder, coder, repeat, runs
from gradwire_lab.library.zero_run import zero_run
from tests.each import each
from tests.strategies import bounded

compiled = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


# ---- coders that are programs --------------------------------------------------------


def test_the_texts_zero_run_is_the_librarys():
    found = compile_coder(Path(__file__).with_name("zero_run.compll"), takes=(uint_3,))
    assert found.texts == zero_run.texts


@pytest.mark.smoke
@compiled
@bounded(40)
@given(
    of=st.sampled_from([1, 242]),
    most=st.sampled_from([2, 13]),  # each of which is compiled
    plain=st.lists(st.sampled_from([0, 1, 2, 242]), max_size=120),
)
def test_any_byte_may_run(of, most, plain):
    """Bytes of five codes are 242 at most, whatever runs."""
    made = coder(
        f"runs_of_{of}_up_to_{most}",
        takes=(uint_3,),
        encode=lambda v: map(
            runs(v, of, most), lambda byte, n: where(n > 1, 241 + n, byte)
        ),
        decode=lambda v: repeat(
            map(v, lambda code: where(code > 242, of, code)),
            map(v, lambda code: where(code > 242, code - 241, 1)),
        ),
    )
    plain_U = torch.tensor(plain, dtype=torch.uint8)
    lengths, coded_C = made.encode(plain_U, 26)
    back_U = torch.full_like(plain_U, 9)
    assert made.decode(lengths, coded_C, back_U, 26) == -1
    assert torch.equal(back_U, plain_U)
    adjacent = [
        len([*same]) for byte, same in groupby(plain_U[:26].tolist()) if byte == of
    ]
    others = int((plain_U[:26] != of).sum())
    if lengths.numel():
        assert int(lengths[0]) == others + sum(-(-count // most) for count in adjacent)


def coding(encode: Any, decode: Any = None) -> Coder:
    return coder(
        "attempt", takes=(uint_3,), encode=encode, decode=decode or whole_codes
    )


def whole_codes(v: Vector) -> Any:
    return repeat(v, map(v, lambda code: 1 + 0 * code))


def cut(v: Vector) -> Vector:
    return map(runs(v, 0, 14), lambda byte, n: where(n > 1, 241 + n, byte))


NO_CODERS = {
    "two alike": (
        lambda: coding(lambda v: cut_to(v, 2)),
        "2 times byte 0 sent as 0, which comes back as 1 times byte 0; give "
        "every run a code",
    ),
    "no byte": (
        lambda: coding(lambda v: map(runs(v, 0, 2), lambda b, n: b * 300)),
        "0 to 255",
    ),
    "no runs": (lambda: coding(lambda v: v), "return map(runs(v, 0, 14), f)"),
    "runs twice": (lambda: coding(lambda v: (cut(v), cut(v))[1]), "cut the bytes once"),
    "runs of runs": (lambda: coding(lambda v: cut(cut(v))), "runs(plain, 0, 14)"),
    "too long": (lambda: coding(lambda v: cut_to(v, 257)), "a length of 2 to 256"),
    "beside its runs": (
        lambda: coding(lambda v: map((*runs(v, 0, 2), v), lambda byte, n, x: byte + x)),
        "map of more than a byte and its length",
    ),
    "filtered": (
        lambda: coding(lambda v: filter(cut(v), lambda c: c > 0)),
        "of more than a byte",
    ),
    "floats": (
        lambda: coding(lambda v: map(cut(v), lambda c: c / 2)),
        "to whole numbers",
    ),
    "no repeat": (lambda: coding(cut, lambda v: v), "return repeat(v, times)"),
    "repeat of one": (
        lambda: coding(cut, lambda v: repeat(v, 1)),
        "repeat(map(coded, value)",
    ),
}


def cut_to(v: Vector, most: Any) -> Vector:
    return map(runs(v, 0, most), lambda byte, n: byte)


@each("case", NO_CODERS)
def test_what_is_no_coder_is_refused_with_the_line(case):
    make, remedy = NO_CODERS[case]
    with pytest.raises(InvalidSetting) as caught:
        make()
    assert str(caught.value).startswith(__file__)
    assert remedy in str(caught.value)
