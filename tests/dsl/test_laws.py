"""Laws asked of programs: what is only rounding is no fault, and what is more is
one.
"""

from __future__ import annotations

import pytest

from gradwire.compress.int8 import int8
from gradwire.contract import Compressor
from gradwire.dsl.language import concat, extract, map, uint1, where
from gradwire.dsl.program import Program
from gradwire.kernels.compiler import reference_only
from gradwire_lab.errors import LawBroken
from gradwire_lab.laws.compressors import (
    law_merge_adds_the_decoded,
    law_residual_holds_what_is_missing,
)
from gradwire_lab.laws.inputs import panel
from gradwire_lab.laws.programs import law_compiled_as_interpreted
from tests.each import each


@pytest.fixture
def _interpreted():
    """What the laws say is the same of both back ends, and nothing has to be
    compiled.
    """
    with reference_only():
        yield


class signs(Program):
    """signSGD: the signs alone, times a step that knows nothing of the gradient's
    magnitude.
    """

    step: float = 1.0

    def encode(self, gradient):
        return concat(bits=map(gradient, lambda x: uint1(x >= 0)))

    def decode(self, compressed):
        (bits,) = extract(compressed)
        return map(bits, lambda bit: where(bit == 1, self.step, -self.step))


class Faulty(Compressor):
    """A program whose methods are right, but for those that a specimen writes anew."""

    def __init__(self, codec):
        self.codec, self.traits = codec, codec.traits

    def init(self, spec):
        return self.codec.init(spec)

    def format(self, spec):
        return self.codec.format(spec)

    def encode(self, state, grad_N, **given):
        return self.codec.encode(state, grad_N, **given)

    def decode(self, payload, out_N, *, scale=1.0):
        return self.codec.decode(payload, out_N, scale=scale)

    def kernels(self):
        return self.codec.kernels()


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
    found = []
    for drawn in panel(64):
        try:
            law(codec, drawn.grad())
        except LawBroken as error:
            found.append(str(error))
    return found


@pytest.mark.usefixtures("_interpreted")
@each("step", [1.0, 1e-30, 1e10])
@each("law", [law_residual_holds_what_is_missing, law_merge_adds_the_decoded])
def test_signs_of_any_magnitude_lose_nothing_but_roundings(law, step):
    assert broken(signs(step=step, block=64), law) == []


@pytest.mark.usefixtures("_interpreted")
@each(
    "law, specimen",
    [
        (law_residual_holds_what_is_missing, forgets),
        (law_merge_adds_the_decoded, adds_too_much),
    ],
)
@each("codec", [signs(block=64), int8(block=64)])
def test_what_is_small_and_no_rounding_is_refused(law, specimen, codec):
    assert broken(codec, law) == []
    assert "off by" in broken(specimen(codec), law)[0]


class rounds_otherwise(Faulty):
    """Decodes to other bits when it is compiled."""

    def decode(self, payload, out_N, *, scale=1.0):
        self.codec.decode(payload, out_N, scale=scale)
        is_compiled = self.codec.kernels().built.library() is not None
        return out_N.mul_(1 + 1e-6) if is_compiled else out_N


def test_what_is_compiled_does_what_is_defined():
    codec = signs(block=64)
    asked = [law_compiled_as_interpreted(codec, drawn.grad()) for drawn in panel(64)]
    assert len(set(asked)) == 1
    if not asked[0]:
        pytest.skip("no C++ compiler here, so the law asks nothing")
    assert (
        "another decoded gradient"
        in broken(rounds_otherwise(codec), law_compiled_as_interpreted)[0]
    )
