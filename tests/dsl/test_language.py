"""What can be written, what it is refused with, and what a class becomes."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from inspect import getsourcelines

import numpy as np
import pytest
import torch

from gradwire.contract import Layout, Traits
from gradwire.dsl.language import (
    add,
    concat,
    extract,
    filter,
    floor,
    greater,
    map,
    random,
    reduce,
    size,
    uint,
    uint1,
    uint2,
    uint8,
    where,
)
from gradwire.dsl.program import Program
from gradwire.errors import InvalidSetting
from gradwire.kernels._build import reference_only

from .programs import int8, onebit, tbq, uniform


@pytest.fixture(autouse=True)
def _interpreted():
    """What a program means does not depend on a compiler."""
    with reference_only():
        yield


def program(encode, decode=lambda self, sent: map(extract(sent)[0], lambda q: q * 1.0)):
    """A compressor with these two functions."""
    return type("attempt", (Program,), {"encode": encode, "decode": decode})()


def codes(udf):
    """An ``encode`` that sends ``udf`` of each element."""
    return lambda self, gradient: concat(q=map(gradient, udf))


def branches(x):
    if x > 0:
        return uint1(1)
    return uint1(0)


REFUSED = {
    "branch": (codes(branches), "where(condition, a, b)"),
    "and": (codes(lambda x: uint1((x > 0) and (x < 1))), "& | ~"),
    "chain": (codes(lambda x: uint1(0 < x < 1)), "& | ~"),
    "builtin max": (codes(lambda x: uint8(max(x, 0))), "where(condition, a, b)"),
    "loop": (lambda self, g: concat(q=sum(x for x in g)), "map, filter or reduce"),
    "place": (lambda self, g: concat(q=g[0]), "filter to select"),
    "len": (lambda self, g: concat(q=reduce(g, add) / len(g)), "size(v)"),
    "math": (codes(lambda x: uint8(math.floor(x))), "the language's own operators"),
    "range": (codes(lambda x: uint8(sum(range(x)))), "the language's own operators"),
    "torch": (codes(lambda x: uint8(torch.abs(x))), "the language's own operators"),
    "numpy": (codes(lambda x: uint8(np.sqrt(x))), "the language's own operators"),
    "power": (codes(lambda x: uint8(x**2)), "x * x"),
    "vector arithmetic": (lambda self, g: concat(q=g * 2), "map(v, lambda x: ...)"),
    "vector as number": (lambda self, g: concat(q=map(g, lambda x: x + g)), "map(v, ...)"),
    "number as vector": (lambda self, g: concat(q=map(1.0, floor)), "takes a vector first"),
    "constant that does not fit": (codes(lambda x: uint2(5)), "uint2 holds 0 to 3"),
    "int that does not fit": (codes(lambda x: uint8(x + 0) & 2**40), "float"),
    "bits of a float": (codes(lambda x: x << 1), "convert with"),
    "no such width": (codes(lambda x: uint(3)(x)), "1, 2, 4 and 8"),
    "filter by a number": (lambda self, g: concat(n=size(filter(g, abs))), "compare"),
    "filters mixed": (
        lambda self, g: concat(q=map((g, filter(g, lambda x: x > 0)), lambda a, b: a + b)),
        "map first",
    ),
    "own fold": (lambda self, g: concat(p=reduce(g, lambda a, b: a * b)), "start="),
    "fold of others": (lambda self, g: concat(p=reduce(g, lambda a, b: a + b * size(g))), "map"),
    "fold from elsewhere": (lambda self, g: concat(p=reduce(g, add, 1.0)), "leave start out"),
    "conditions": (codes(lambda x: x > 0), "uint1(condition)"),
    "filtered field": (lambda self, g: concat(q=filter(g, lambda x: x > 0)), "map with where"),
    "no field": (lambda self, g: concat(q=3), "depends on the gradient"),
    "one element": (lambda self, g: concat(q=random()), "vector with map"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_traced_is_refused_with_line_and_remedy(case):
    encode, remedy = REFUSED[case]
    with pytest.raises(InvalidSetting) as caught:
        program(encode)
    place, _, text = str(caught.value).partition(": ")
    assert place.rpartition(":")[0] == __file__
    assert remedy in text


def test_the_line_is_that_of_the_branch():
    with pytest.raises(InvalidSetting, match=rf":{getsourcelines(branches)[1] + 1}: a branch on"):
        program(codes(branches))


@pytest.mark.parametrize(
    ("decode", "remedy"),
    [
        (lambda self, sent: map(extract(sent)[0], lambda q: q + random()), "draw in encode"),
        (lambda self, sent: extract(sent)[0], None),
        (lambda self, sent: 1.0, "a vector of all elements"),
        (lambda self, sent: filter(extract(sent)[0], lambda q: q > 0), "a vector of all elements"),
        (lambda self, sent: extract(1), "what decode is given"),
    ],
)
def test_decode_gives_one_number_an_element(decode, remedy):
    if remedy is None:
        out_N = torch.empty(3)
        codec = program(codes(lambda x: uint8(x)), decode)
        payload, _ = codec.encode(None, torch.tensor([1.0, 2.7, 300.0]))
        assert codec.decode(payload, out_N).tolist() == [1, 2, 255]
        return
    with pytest.raises(InvalidSetting, match=remedy.replace("(", r"\(")):
        program(codes(lambda x: uint8(x)), decode)


def test_a_program_is_a_frozen_dataclass_of_its_settings():
    codec = tbq(threshold=0.5)
    assert repr(codec) == "tbq(block=16384, threshold=0.5)"
    assert codec == tbq(threshold=0.5) != tbq()
    with pytest.raises(FrozenInstanceError):
        codec.threshold = 1.0
    with pytest.raises(TypeError):
        tbq(0.5)


def test_keywords_of_the_class_are_traits():
    assert onebit.traits == Traits(layout=Layout.PACKED, contraction=True, error_feedback=True)
    assert uniform().traits.unbiased


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tbq(threshold="a"), "tbq threshold must be float"),
        (lambda: uniform(bitwidth=2.5), "uniform bitwidth must be int"),
        (lambda: uniform(seed=True), "uniform seed must be int"),
        (lambda: uniform(bitwidth=3), "widths are 1, 2, 4 and 8"),
        (lambda: int8(block=100), "a positive multiple of 64"),
        (lambda: int8(block=0), "a positive multiple of 64"),
        (lambda: type("half", (Program,), {"encode": codes(floor)}), "write both"),
        (lambda: program(lambda self, g: g), "return concat"),
        (lambda: program(lambda self, g: concat(sum=reduce(g, add))), "none of the kernels' own"),
    ],
)
def test_settings_and_classes_are_checked(make, text):
    with pytest.raises(InvalidSetting, match=text):
        make()


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


def test_python_and_numpy_meet_the_language_halfway():
    codec = program(
        lambda self, g: concat(q=map(g, lambda x: uint8(round(x * np.float32(2)) + np.int64(1))))
    )
    payload, _ = codec.encode(None, torch.tensor([0.1, 0.25, 0.75, 1.2]))
    assert payload["q"].tolist() == [1, 1, 3, 3]  # halves to even


def test_a_long_program_is_no_problem():
    def encode(self, gradient):
        return concat(q=map(gradient, lambda x: sum(where(x > i, 1.0, 0.0) for i in range(3000))))

    payload, _ = program(encode).encode(None, torch.tensor([0.5, 1000.5]))
    assert payload["q"].tolist() == [1, 1001]


def test_a_gradient_of_two_dimensions_is_refused():
    with pytest.raises(InvalidSetting, match="flatten"):
        onebit().encode(None, torch.zeros(2, 2))


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
