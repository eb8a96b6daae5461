"""What can be written, and what a class becomes."""

from __future__ import annotations

import math
import operator as operators
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from gradwire.dsl.ir import load_buffer
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
    uint2,
    uint8,
    where,
    whole,
)
from gradwire.dsl.program import Program
from gradwire.dsl.rewrite import GRADIENT
from gradwire.dsl.symbols import Scalar
from gradwire.errors import InvalidSetting
from gradwire.kernels.libraries import reference_only
from gradwire_lab.compress.tbq import tbq
from tests.dsl.attempts import program
from tests.each import each


@pytest.fixture(autouse=True)
def _interpreted():
    """What a program means does not depend on a compiler."""
    with reference_only():
        yield


def test_a_program_is_a_frozen_dataclass_of_its_settings():
    codec = tbq(threshold=0.5)
    assert repr(codec) == "tbq(block=16384, threshold=0.5)"
    assert codec == tbq(threshold=0.5) != tbq()
    with pytest.raises(FrozenInstanceError):
        codec.threshold = 1.0
    with pytest.raises(InvalidSetting, match=r"write tbq\(threshold=0.5\)"):
        tbq(0.5)


def test_settings_and_captured_values_are_plain_numbers():
    class stepped(Program):
        levels: int = 3

        def encode(self, gradient):
            widths = [0.5**i for i in range(self.levels)]  # plain Python around the language
            rank = map(gradient, lambda x: sum(where(abs(x) > w, 1, 0) for w in widths))
            return concat(q=map(rank, uint2))

        def decode(self, sent):
            return map(extract(sent)[0], lambda q: q / self.levels)

    payload, _ = stepped().encode(None, torch.tensor([0.1, 0.3, -0.7, 2.0]))
    assert payload["q"].tolist() == [0b11_10_01_00]


@each("operator", ["add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne"])
@each("number", [np.float32(2), np.float64(0.5), np.int64(3)])
def test_numpys_numbers_are_numbers_on_either_side(operator, number):
    scalar, apply = Scalar(load_buffer(GRADIENT)), getattr(operators, operator)
    for given in ((number, scalar), (scalar, number)):
        plain = [one.item() if one is number else one for one in given]
        assert apply(*given).node is apply(*plain).node


def test_python_and_numpy_meet_the_language_halfway():
    codec = program(
        lambda self, g: concat(q=map(g, lambda x: uint8(round(x * np.float32(2)) + np.int64(1))))
    )
    payload, _ = codec.encode(None, torch.tensor([0.1, 0.25, 0.75, 1.2]))
    assert payload["q"].tolist() == [1, 1, 3, 3]  # halves to even


def test_latest_is_the_gradient_without_the_residual():
    class both(Program, reads_latest=True):
        def encode(self, gradient, latest):
            sums = map((gradient, latest), lambda g, x: uint8(g * 16 + x))
            return concat(most=whole(reduce(latest, greater), greater), q=sums)

        def decode(self, compressed):
            return map(extract(compressed)[1], lambda q: q * 0.0)

    grad_N = torch.tensor([1.0, 2.0, 3.0])
    payload, _ = both().encode(None, grad_N)
    assert payload["q"].tolist() == [17, 34, 51]
    for dtype in (torch.float32, torch.float64):
        residual_N = torch.ones(3, dtype=dtype)
        payload, _ = both().encode(None, grad_N.to(dtype), residual_N=residual_N)
        assert payload["q"].tolist() == [33, 50, 67]
        assert payload["most"].item() == 3
        assert residual_N.tolist() == [2, 3, 4]


@pytest.mark.slow
def test_a_long_program_is_no_problem():
    def encode(self, gradient):
        return concat(q=map(gradient, lambda x: sum(where(x > i, 1.0, 0.0) for i in range(3000))))

    payload, _ = program(encode).encode(None, torch.tensor([0.5, 1000.5]))
    assert payload["q"].tolist() == [1, 1001]


def test_reductions_of_nothing():
    class nothing(Program):
        def encode(self, gradient):
            none = filter(gradient, lambda x: x != x)
            return concat(
                count=size(none),
                total=reduce(none, add),
                top=reduce(none, greater),
                q=one(gradient),
            )

        def decode(self, sent):
            return extract(sent)[3]

    def one(gradient):
        return map(gradient, lambda x: uint1(1))

    payload, _ = nothing().encode(None, torch.ones(5))
    assert [payload[name].item() for name in ("count", "total", "top")] == [0, 0.0, -math.inf]
    assert payload["q"].item() == 0b11111
