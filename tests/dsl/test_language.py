"""What can be written, what a class becomes, and the words by which anything else is
refused.
"""

from __future__ import annotations

import math
import operator as operators
import re
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from gradwire.compress.int8 import int8
from gradwire.compress.uniform import uniform
from gradwire.dsl.ir import load_buffer
from gradwire.dsl.language import (
    add,
    concat,
    extract,
    filter,
    floor,
    greater,
    indices,
    int32,
    map,
    pick,
    random,
    reduce,
    sample,
    scatter,
    size,
    sort,
    top,
    uint,
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
from tests.each import each


def program(encode, decode=lambda self, sent: map(extract(sent)[0], lambda q: q * 1.0)):
    """A compressor with these two functions."""
    return type("attempt", (Program,), {"encode": encode, "decode": decode})()


def codes(udf):
    """An ``encode`` that sends ``udf`` of each element."""
    return lambda self, gradient: concat(q=map(gradient, udf))


# ---- what can be written -------------------------------------------------------------


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
            # plain Python around the language
            widths = [0.5**i for i in range(self.levels)]
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
        lambda self, g: concat(
            q=map(g, lambda x: uint8(round(x * np.float32(2)) + np.int64(1)))
        )
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
        return concat(
            q=map(gradient, lambda x: sum(where(x > i, 1.0, 0.0) for i in range(3000)))
        )

    payload, _ = program(encode).encode(None, torch.tensor([0.5, 1000.5]))
    assert payload["q"].tolist() == [1, 1001]


def test_reductions_of_nothing_give_their_neutral_value():
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
    assert [payload[name].item() for name in ("count", "total", "top")] == [
        0,
        0.0,
        -math.inf,
    ]
    assert payload["q"].item() == 0b11111


# ---- what cannot be written ----------------------------------------------------------


def sent(kept):
    """A payload of what was kept."""
    return concat(indices=indices(kept), values=kept)


def branches(x):
    if x > 0:
        return uint1(1)
    return uint1(0)


REFUSED = {
    "branch": (codes(branches), "where(condition, a, b)"),
    "chain": (codes(lambda x: uint1(0 < x < 1)), "& | ~"),
    "builtin max": (codes(lambda x: uint8(max(x, 0))), "where(condition, a, b)"),
    "loop": (lambda self, g: concat(q=sum(x for x in g)), "map, filter or reduce"),
    "place": (lambda self, g: concat(q=g[0]), "filter to select"),
    "len": (lambda self, g: concat(q=reduce(g, add) / len(g)), "size(v)"),
    "math": (codes(lambda x: uint8(math.floor(x))), "the language's own operators"),
    "range": (codes(lambda x: uint8(sum(range(x)))), "the language's own operators"),
    "torch": (codes(lambda x: uint8(torch.abs(x))), "the language's own operators"),
    "numpy": (codes(lambda x: uint8(np.sqrt(x))), "the language's own operators"),
    "array": (
        codes(lambda x: uint8(np.ones(2) * x)),
        "where a number is needed; use map(v, ...)",
    ),
    "power": (codes(lambda x: uint8(x**2)), "x * x"),
    "vector arithmetic": (lambda self, g: concat(q=g * 2), "map(v, lambda x: ...)"),
    "vector as number": (
        lambda self, g: concat(q=map(g, lambda x: x + g)),
        "map(v, ...)",
    ),
    "number as vector": (
        lambda self, g: concat(q=map(1.0, floor)),
        "takes a vector first",
    ),
    "constant that does not fit": (codes(lambda x: uint2(5)), "uint2 holds 0 to 3"),
    "int that does not fit": (codes(lambda x: uint8(x + 0) & 2**40), "float"),
    "bits of a float": (codes(lambda x: x << 1), "convert with"),
    "no such width": (codes(lambda x: uint(3)(x)), "1, 2, 4 and 8"),
    "filter by a number": (lambda self, g: concat(n=size(filter(g, abs))), "compare"),
    "filters mixed": (
        lambda self, g: concat(
            q=map((g, filter(g, lambda x: x > 0)), lambda a, b: a + b)
        ),
        "map first",
    ),
    "own fold": (lambda self, g: concat(p=reduce(g, lambda a, b: a * b)), "start="),
    "fold of others": (
        lambda self, g: concat(p=reduce(g, lambda a, b: a + b * size(g))),
        "map",
    ),
    "fold from elsewhere": (
        lambda self, g: concat(p=reduce(g, add, 1.0)),
        "leave start out",
    ),
    "conditions": (codes(lambda x: x > 0), "uint1(condition)"),
    "top of a map": (
        lambda self, g: sent(top(map(filter(g, lambda x: x > 0), abs), 0.1)),
        "map what is left",
    ),
    "top of all": (lambda self, g: sent(top(g, 0.1)), "filter first"),
    "top of a number": (
        lambda self, g: sent(top(filter(g, lambda x: x > 0), 5)),
        "a number in (0, 1]",
    ),
    "indices of all": (lambda self, g: concat(i=indices(g)), "leave its place out"),
    "two filters": (
        lambda self, g: concat(
            i=indices(filter(g, lambda x: x > 0)), v=filter(g, lambda x: x > 1)
        ),
        "filter once",
    ),
    "kept beside all": (
        lambda self, g: concat(i=indices(filter(g, lambda x: x > 0)), v=g),
        "send either",
    ),
    "reduce after top": (
        lambda self, g: concat(s=reduce(top(filter(g, lambda x: x > 0), 0.1), add)),
        "reduce before top",
    ),
    "scatter in encode": (lambda self, g: scatter(g, g), "send indices(kept)"),
    "sample of kept": (
        lambda self, g: concat(q=pick(sample(filter(g, lambda x: x > 0), 0.1), 0.5)),
        "sample, then filter",
    ),
    "sample of everything and more": (lambda self, g: sample(g, 2), "0.001 for 0.1 %"),
    "sample of blocks": (
        lambda self, g: sample(map(g, lambda x: x * reduce(g, add)), 0.1),
        "whole-gradient scalars",
    ),
    "sample of draws": (
        lambda self, g: sample(map(g, lambda x: x * random()), 0.1),
        "whole-gradient scalars",
    ),
    "sort of a number": (
        lambda self, g: sort(reduce(g, add), greater),
        "sort(sample(v, share)",
    ),
    "sort of kept": (
        lambda self, g: sort(filter(g, lambda x: x > 0), greater),
        "filter by what was picked",
    ),
    "sort of whole numbers": (
        lambda self, g: sort(map(g, int32), greater),
        "map(v, float32)",
    ),
    "no order": (lambda self, g: sort(sample(g, 0.1), add), "by smaller or greater"),
    "an order by a key": (
        lambda self, g: sort(g, lambda a, b: abs(a) < abs(b)),
        "map to what",
    ),
    "not less": (lambda self, g: sort(g, lambda a, b: a <= b), "by smaller or greater"),
    "a branch in an order": (
        lambda self, g: sort(g, lambda a, b: a if a > b else b),
        "where(",
    ),
    "pick of disorder": (lambda self, g: pick(sample(g, 0.1), 0.5), "sort(sample(v"),
    "pick beyond": (lambda self, g: pick(sort(sample(g, 0.1), greater), 2.0), "[0, 1]"),
    "whole of a vector": (lambda self, g: whole(g, add), "whole(reduce(v, f), f)"),
    "whole of the whole": (
        lambda self, g: whole(whole(reduce(g, add), add), add),
        "known of the whole gradient already",
    ),
    "filtered field": (
        lambda self, g: concat(q=filter(g, lambda x: x > 0)),
        "indices(kept)",
    ),
    "no field": (lambda self, g: concat(q=3), "depends on the gradient"),
    "one element": (lambda self, g: concat(q=random()), "vector with map"),
}


@each("case", REFUSED)
def test_what_cannot_be_traced_is_refused_with_line_and_remedy(case):
    encode, remedy = REFUSED[case]
    with pytest.raises(InvalidSetting) as caught:
        program(encode)
    place, _, text = str(caught.value).partition(": ")
    assert place.rpartition(":")[0] == __file__
    assert remedy in text


@each(
    "decode, remedy",
    [
        (
            lambda self, sent: map(extract(sent)[0], lambda q: q + random()),
            "do it in encode",
        ),
        (lambda self, sent: 1.0, "a vector of all elements"),
        (
            lambda self, sent: filter(extract(sent)[0], lambda q: q > 0),
            "a vector of all elements",
        ),
        (lambda self, sent: extract(1), "what decode is given"),
        (
            lambda self, sent: map(extract(sent)[0], lambda q: sample(sent, 0.1)),
            "in encode",
        ),
        (
            lambda self, sent: scatter(extract(sent)[0], extract(sent)[0]),
            "send indices(kept)",
        ),
    ],
)
def test_decode_that_gives_anything_but_one_number_an_element_is_refused(
    decode, remedy
):
    with pytest.raises(InvalidSetting, match=re.escape(remedy)):
        program(codes(lambda x: uint8(x)), decode)


KEPT_REFUSED = {
    "not scattered": (lambda self, sent: extract(sent)[1], "scatter(indices, values)"),
    "values for places": (
        lambda self, sent: scatter(*extract(sent)[1::-1]),
        "indices(kept)",
    ),
    "ints for places": (
        lambda self, sent: scatter(extract(sent)[2], extract(sent)[1]),
        "indices",
    ),
    "computed places": (
        lambda self, sent: scatter(
            map(extract(sent)[0], lambda i: i + 1), extract(sent)[1]
        ),
        "that indices(kept) filled",
    ),
    "values a block": (
        lambda self, sent: scatter(
            extract(sent)[0], map(extract(sent)[1], lambda v: v * extract(sent)[3])
        ),
        "send one value a kept element",
    ),
    "map after scatter": (
        lambda self, sent: map(scatter(*extract(sent)[:2]), abs),
        "map takes a vector first",
    ),
    "reduced in decode": (
        lambda self, sent: map(
            extract(sent)[1], lambda v: v * reduce(extract(sent)[1], add)
        ),
        "reduce in encode",
    ),
}


@each("case", KEPT_REFUSED)
def test_kept_fields_are_decoded_by_scatter(case):
    def encode(self, gradient):
        kept = filter(gradient, lambda x: x > 0)
        whole_numbers = map(kept, int32)
        total = reduce(gradient, add)
        return concat(
            indices=indices(kept), values=kept, ints=whole_numbers, total=total
        )

    decode, remedy = KEPT_REFUSED[case]
    with pytest.raises(InvalidSetting, match=re.escape(remedy)):
        program(encode, decode)


class annotated(Program):
    """A setting whose annotation is a type and no text, as without the import from
    __future__.
    """

    __annotations__ = {"share": float}
    share = 0.5

    def encode(self, gradient):
        return concat(q=map(gradient, lambda x: x * self.share))

    def decode(self, sent):
        return extract(sent)[0]


@each(
    "make, text",
    [
        (lambda: tbq(threshold="a"), "tbq threshold must be float"),
        (lambda: uniform(bitwidth=2.5), "uniform bitwidth must be int"),
        (lambda: uniform(seed=True), "uniform seed must be int"),
        (lambda: annotated(share="a"), "annotated share must be float, got 'a'"),
        (lambda: uniform(bitwidth=3), "uniform bitwidth must be 1, 2, 4 or 8, got 3"),
        (lambda: int8(block=100), "a multiple of 64, 64 to "),
        (lambda: int8(block=0), "a multiple of 64, 64 to "),
        (lambda: type("half", (Program,), {"encode": codes(floor)}), "write both"),
        (lambda: program(lambda self, g: g), "return concat"),
        (
            lambda: program(lambda self, g: concat(sum=reduce(g, add))),
            "no name that kernels use",
        ),
    ],
)
def test_settings_and_classes_are_checked(make, text):
    with pytest.raises(InvalidSetting, match=text):
        make()


def test_a_seed_that_is_no_setting_is_refused():
    class constant(Program):
        seed = 3

        def encode(self, gradient):
            return concat(q=map(gradient, lambda x: x + random()))

        def decode(self, sent):
            return extract(sent)[0]

    with pytest.raises(InvalidSetting, match="seed: int = 0"):
        constant()
