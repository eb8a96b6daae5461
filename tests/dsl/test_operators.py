"""Registered operators: what is refused, how they are used, and that every form has one
meaning.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.dsl import rewrite
from gradwire.dsl.build import Built
from gradwire.dsl.e4m3 import from_e4m3, to_e4m3
from gradwire.dsl.interp import Draws
from gradwire.dsl.ir import (
    FLOAT32,
    Buffer,
    Extent,
    Kernel,
    Op,
    const,
    load_buffer,
    node,
    store,
)
from gradwire.dsl.language import (
    Compressed,
    Scalar,
    Vector,
    concat,
    extract,
    float32,
    int32,
    map,
    reduce,
    uint1,
    uint8,
)
from gradwire.dsl.operators import Operator, register
from gradwire.dsl.program import Program
from gradwire.errors import InvalidSetting
from gradwire.kernels.compiler import find_compiler
from gradwire.kernels.libraries import reference_only
from gradwire_lab.laws.tolerance import same_bits
from gradwire_lab.library.exponent import exp2, exponent
from tests.dsl.single_runs import run_of
from tests.each import each
from tests.strategies import bounded

compiled = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

copysign = register(
    Operator(
        "signed_as",
        operands=(float32, float32),
        result=float32,
        interp=torch.copysign,
        cpp="__builtin_copysignf({}, {})",
        triton="tl.where({1}.to(tl.int32, bitcast=True) < 0, "
        "-tl.abs({0}), tl.abs({0}))",
    )
)
farther = register(
    Operator(
        "farther",
        operands=(float32, float32),
        result=float32,
        interp=lambda a, b: torch.where(b.abs() > a.abs(), b, a),
        cpp="gw::abs({1}) > gw::abs({0}) ? {1} : {0}",
    )
)
blended = register(
    Operator(
        "blended",
        operands=(float32, int32, bool),
        result=float32,
        interp=lambda x, n, chosen: torch.where(chosen, x * n, x - n),
        cpp="{2} ? {0} * float({1}) : gw_test::less({0}, {1})",
        cpp_support="namespace gw_test {\n"
        "inline float less(float x, int n) { return x - n; }\n}",
    )
)


class signs(Program):
    """Uses one operator in a map, one in a reduction and one in decode."""

    def encode(self, gradient: Vector) -> Compressed:
        far = reduce(gradient, farther, start=0.0)
        bits = map(gradient, lambda x: uint1(copysign(1, x) > 0))
        return concat(far=far, bits=bits)

    def decode(self, compressed: Compressed) -> Vector:
        far, bits = extract(compressed)
        return map(bits, lambda bit: blended(far, bit + 2, bit == 1))


def test_an_operator_serves_in_maps_reductions_and_decode():
    grad_N = torch.tensor([3.0, -4.0, -0.0])
    with reference_only():
        payload, _ = signs().encode(None, grad_N)
        assert payload["bits"].tolist() == [1]
        assert payload["far"].tolist() == [-4.0]
        assert signs().decode(payload, torch.empty(3)).tolist() == [-12.0, -6.0, -6.0]


@compiled
@bounded(40)
@given(st.lists(st.floats(width=32), min_size=1, max_size=200))
def test_cpp_is_the_interpreter(values):
    grad_N = torch.tensor(values)
    assert signs().kernels().built.library() is not None
    payload, _ = signs().encode(None, grad_N)
    decoded_N = signs().decode(payload, torch.empty(len(values)))
    with reference_only():
        reference, _ = signs().encode(None, grad_N)
        again_N = signs().decode(payload, torch.empty(len(values)))
    assert same_bits(payload.buffer, reference.buffer)
    assert same_bits(decoded_N, again_N)


# ---- what is refused -----------------------------------------------------------------


def made(**changed: Any) -> Operator:
    forms = {
        "operands": (float32,),
        "result": float32,
        "interp": torch.exp2,
        "cpp": "f({})",
    }
    return Operator(changed.pop("name", "attempt"), **{**forms, **changed})


@each(
    "changed, text",
    [
        ({"name": "two words"}, "a name of its own"),
        ({"name": "floor"}, "a name of its own"),
        ({"operands": ()}, "one or more of float32, int32 and bool"),
        ({"operands": (uint8,)}, "take unsigned ones as int32"),
        ({"interp": None}, "a function of torch tensors"),
        ({"cpp": ""}, "cpp must be an expression that uses each of 1 operands"),
        ({"cpp": "f()"}, "uses each of 1 operands"),
        ({"cpp": "f({}, {})"}, "uses each of 1 operands"),
        ({"triton": "f({1})"}, "triton must be an expression that uses each"),
    ],
)
def test_forms_that_do_not_fit_are_refused(changed, text):
    with pytest.raises(InvalidSetting, match=text):
        made(**changed)


@each(
    "encode, text",
    [
        (lambda self, g: concat(q=map(g, lambda x: copysign(x))), "it takes 2"),
        (
            lambda self, g: concat(q=map(g, lambda x: blended(x, x, x > 0))),
            "convert with",
        ),
        (lambda self, g: concat(q=map(g, lambda x: blended(x, 1, x))), "convert with"),
        (lambda self, g: concat(q=copysign(g, 1.0)), "map"),
    ],
)
def test_operands_that_do_not_fit_are_refused_with_the_line(encode, text):
    with pytest.raises(InvalidSetting, match=text) as caught:
        type(
            "attempt", (Program,), {"encode": encode, "decode": lambda self, sent: sent}
        )()
    assert str(caught.value).startswith(__file__)


def test_a_result_of_another_type_is_refused():
    wrong = made(interp=lambda x: x.double())
    with pytest.raises(InvalidSetting, match=r"torch.float32, got torch.float64"):
        wrong.interpreted(torch.ones(1))


def test_constants_are_folded_by_the_definition():
    two = const(2.0, FLOAT32)
    (folded,) = rewrite.simplified(
        (node(Op.OPERATOR, two, const(-1.0, FLOAT32), arg=copysign),)
    )
    assert (folded.op, folded.arg) == (Op.CONST, -2.0)


# ---- e4m3 ----------------------------------------------------------------------------

IN = Buffer("in", FLOAT32, Extent.ELEMENT)
OUT = Buffer("out", FLOAT32, Extent.ELEMENT)
CODES = torch.arange(256, dtype=torch.float32)
FINITE = [code for code in range(128) if code != 0x7F]


def by(operator: Operator, values_N: torch.Tensor, *, cpp: bool) -> torch.Tensor:
    """What an operator of one number gives for each, as float32, by C++ or by the
    interpreter.
    """
    element = Scalar(load_buffer(IN))
    taken = element if operator.dtypes == (FLOAT32,) else int32(element)
    form = Kernel(
        operator.name, 64, (IN, OUT), (store(OUT, float32(operator(taken)).node),)
    )
    built, out_N = Built(form), torch.empty_like(values_N)
    with contextlib.nullcontext() if cpp else reference_only():
        assert (built.library() is not None) == cpp
        run_of(built)(form, {"in": values_N, "out": out_N}, values_N.numel(), Draws())
    return out_N


def awkward() -> torch.Tensor:
    """Every number of the format, every tie, what lies beside them, and what is past
    the end.
    """
    exact_M = from_e4m3.interp(torch.tensor(FINITE))
    ties_M = (exact_M[1:] + exact_M[:-1]) / 2
    near_M = torch.cat([exact_M, ties_M])
    up_M, down_M = (near_M.nextafter(torch.tensor(limit)) for limit in (1e9, -1.0))
    past_M = torch.tensor(
        [456.0, 464.0, 480.0, 512.0, 1e9, 3e38, torch.inf, torch.nan, 1e-45]
    )
    values_M = torch.cat([near_M, up_M, down_M, past_M])
    return torch.cat([values_M, -values_M])


def test_every_code_stands_for_the_number_of_the_standard():
    decoded = from_e4m3.interp(torch.arange(256))
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        sign = -1.0 if code & 0x80 else 1.0
        scale = 2.0 ** (max(exponent, 1) - 7)
        number = sign * scale * (fraction / 8 + (exponent > 0))
        if code & 0x7F == 0x7F:
            assert decoded[code].isnan()
        else:
            assert same_bits(decoded[code], torch.tensor(number)), hex(code)
            assert int(to_e4m3.interp(torch.tensor(number))) == code


def test_the_nearest_code_is_chosen_and_ties_go_to_even():
    exact_M = from_e4m3.interp(torch.tensor(FINITE))
    values_N = awkward().abs()
    values_N = values_N[values_N.isfinite()]
    codes_N = to_e4m3.interp(values_N)
    off_NM = (values_N.double()[:, None] - exact_M.double()).abs()
    nearest_NM = off_NM == off_NM.min(1, keepdim=True).values
    assert bool(nearest_NM.gather(1, codes_N.long()[:, None]).all())
    tied_N = nearest_NM.sum(1) == 2
    assert int(tied_N.sum()) >= len(FINITE) - 1
    assert bool((codes_N[tied_N] % 2 == 0).all())


@compiled
def test_e4m3_in_cpp_is_torchs_for_every_code_and_tie():
    assert same_bits(by(from_e4m3, CODES, cpp=True), by(from_e4m3, CODES, cpp=False))
    values_N = awkward()
    assert same_bits(by(to_e4m3, values_N, cpp=True), by(to_e4m3, values_N, cpp=False))


# ---- exponents -----------------------------------------------------------------------


def test_an_exponent_is_that_of_logb_and_a_power_that_of_ldexp():
    values_N = torch.cat([awkward(), 2.0 ** torch.arange(-126, 128)])
    normal_N = values_N[values_N.isfinite() & (values_N.abs() >= 2.0**-126)]
    for value, found in zip(
        normal_N.tolist(), exponent.interp(normal_N).tolist(), strict=True
    ):
        assert 2.0**found <= abs(value) < 2.0 ** (found + 1)
    rest_N = torch.tensor([0.0, 1e-45, torch.inf, torch.nan])
    assert exponent.interp(rest_N).tolist() == [-127, -127, 128, 128]
    powers_N = exp2.interp(torch.tensor([-1000, -127, -126, 0, 127, 128, 1000]).int())
    assert powers_N.tolist() == [0, 0, 2.0**-126, 1, 2.0**127, torch.inf, torch.inf]


@compiled
def test_exponents_in_cpp_are_the_interpreters():
    values_N = torch.cat([awkward(), torch.arange(-300, 300).float()])
    for operator in (exponent, exp2):
        assert same_bits(
            by(operator, values_N, cpp=True), by(operator, values_N, cpp=False)
        )
