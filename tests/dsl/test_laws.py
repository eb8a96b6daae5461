"""Laws that ``gradwire compll check`` asks: what is only rounding is no fault, a fault is one."""

from __future__ import annotations

import pytest

from gradwire.compress.int8 import int8
from gradwire.dsl import laws
from gradwire.dsl.language import concat, extract, map, uint1, where
from gradwire.dsl.program import Program
from gradwire.kernels.compiler import reference_only
from gradwire.load import examples

PROGRAMS = [made for made in examples("compress") if isinstance(made, Program)]


@pytest.fixture(autouse=True)
def _interpreted():
    """What the laws say is the same of both back ends, and nothing has to be compiled."""
    with reference_only():
        yield


class signs(Program):
    """signSGD: the signs alone, times a step that knows nothing of the gradient's magnitude."""

    step: float = 1.0

    def encode(self, gradient):
        return concat(bits=map(gradient, lambda x: uint1(x >= 0)))

    def decode(self, compressed):
        (bits,) = extract(compressed)
        return map(bits, lambda bit: where(bit == 1, self.step, -self.step))


class Faulty:
    """A program whose methods are right, but for those that a specimen writes anew."""

    def __init__(self, codec):
        self.codec = codec

    def __getattr__(self, name):
        return getattr(self.codec, name)


class forgets(Faulty):
    """Drops a thousandth of what it did not send."""

    def encode(self, state, grad_N, *, residual_N=None):
        made = self.codec.encode(state, grad_N, residual_N=residual_N)
        residual_N.mul_(1 - 1e-3)
        return made


class adds_too_much(Faulty):
    """Adds what was sent a hundred-thousandth too large."""

    def merge(self, payload, sum_N, *, scale):
        self.codec.merge(payload, sum_N, scale=scale * (1 + 1e-5))


def broken(codec, law):
    """What a law says is wrong of a program, over the whole panel."""
    found = (law(codec, grad_N) for _, grad_N in laws.panel(64))
    return [wrong for wrong in found if wrong]


@pytest.mark.parametrize("step", [1.0, 1e-30, 1e10])
@pytest.mark.parametrize(
    "law", [laws.residual_is_what_is_missing, laws.merge_adds_what_decode_gives]
)
def test_signs_of_any_magnitude_lose_nothing_but_roundings(law, step):
    assert broken(signs(step=step, block=64), law) == []


@pytest.mark.parametrize(
    ("law", "specimen"),
    [
        (laws.residual_is_what_is_missing, forgets),
        (laws.merge_adds_what_decode_gives, adds_too_much),
    ],
)
@pytest.mark.parametrize("codec", [signs(block=64), int8(block=64)], ids=repr)
def test_what_is_small_and_no_rounding_is_refused(law, specimen, codec):
    assert broken(codec, law) == []
    assert "off by" in broken(specimen(codec), law)[0]


@pytest.mark.parametrize("codec", PROGRAMS, ids=repr)
def test_shipped_programs_keep_them(codec):
    for law in (laws.residual_is_what_is_missing, laws.merge_adds_what_decode_gives):
        assert broken(codec, law) == []
