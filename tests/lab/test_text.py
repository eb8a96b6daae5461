"""CompLL's own text: figure 5 runs as printed, C's rules hold, mistakes are shown in
their line.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from gradwire.contract.spec import TensorSpec
from gradwire.dsl.language import (
    Compressed,
    Scalar,
    Vector,
    concat,
    extract,
    floor,
    greater,
    map,
    random,
    reduce,
    size,
    smaller,
    uint2,
    uint8,
)
from gradwire.dsl.program import Program
from gradwire.errors import InvalidSetting
from gradwire.kernels.compiler import reference_only
from gradwire_lab.compll_text.compile import compile_text
from gradwire_lab.laws.inputs import make_gradient
from gradwire_lab.laws.tolerance import same_bits
from tests.each import each

HERE = Path(__file__).parent
PRINTED, DECODE = HERE / "terngrad.compll", HERE / "terngrad_decode.compll"
GRAD_N = torch.tensor([-1.0, 0.0, 1.0, 2.0, 0.5])


class embedded(Program):
    """Figure 5 in Python."""

    bitwidth: int
    seed: int = 0

    def encode(self, gradient: Vector) -> Compressed:
        low, high = reduce(gradient, smaller), reduce(gradient, greater)
        gap = (high - low) / ((1 << self.bitwidth) - 1)

        def code(x: Scalar) -> Scalar:
            return uint2(floor((x - low) / gap + random(0, 1)))

        return concat(
            bitwidth=uint8(self.bitwidth),
            tail=uint8(size(gradient) & ((1 << self.bitwidth) - 1)),
            min=low,
            max=high,
            Q=map(gradient, code),
        )

    def decode(self, compressed: Compressed) -> Vector:
        bitwidth, _, low, high, codes = extract(compressed)
        gap = (high - low) / ((1 << bitwidth) - 1)
        return map(codes, lambda code: low + code * gap)


# ---- the figure ----------------------------------------------------------------------


@pytest.mark.smoke
def test_figure_5_encodes_as_printed():
    codec = compile_text(PRINTED)(bitwidth=2)
    assert repr(codec) == "terngrad(block=16384, bitwidth=2, seed=0)"
    payload, _ = codec.encode(None, GRAD_N)
    assert [field.name for field in payload.format] == [
        "bitwidth",
        "tail",
        "min",
        "max",
        "Q",
    ]
    fixed = [payload[name].tolist() for name in ("bitwidth", "tail", "min", "max")]
    assert fixed == [[2], [len(GRAD_N) % 4], [-1.0], [2.0]]
    codes = [int(payload["Q"][i // 4]) >> 2 * (i % 4) & 3 for i in range(5)]
    assert codes[:4] == [0, 1, 2, 3]  # on a level: nothing to round
    assert codes[4] in (1, 2)


@pytest.mark.smoke
@each("numel", [1, 300])
def test_the_text_is_the_program_it_says(numel):
    text = compile_text(PRINTED, DECODE, name="embedded")(bitwidth=2, block=128, seed=3)
    python = embedded(bitwidth=2, block=128, seed=3)
    assert repr(text) == repr(python)
    assert text.kernels().built.text == python.kernels().built.text
    grad_N = make_gradient("normal", numel, torch.float32)
    spec = TensorSpec("w", numel)
    ours, theirs = (c.encode(c.init(spec), grad_N)[0] for c in (text, python))
    assert same_bits(ours.buffer, theirs.buffer)
    out_N = text.decode(ours, torch.empty(numel))
    assert same_bits(out_N, python.decode(theirs, torch.empty(numel)))


# ---- C -------------------------------------------------------------------------------


def sent(body: str, before: str = "", **settings) -> list:
    """What ``compressed = concat(...)`` in ``body`` sends of [-1, 0, 1, 2, 0.5], by
    field.
    """
    text = f"{before}\nvoid encode(float* gradient, uint8* compressed) {{ {body} }}"
    with reference_only():  # what the text says, not how fast: nothing is compiled
        payload, _ = compile_text(text)(**settings).encode(None, GRAD_N)
    return [payload[field.name].tolist() for field in payload.format]


@each(
    "expression, value",
    [
        ("-7 / 2", -3),
        ("-7 % 4", -3),
        ("1 + 2 * 3 << 1", 14),
        ("6 ^ 3", 5),
        ("0x1F & 6 | 8", 14),
        ("!(3 > 2) || 1 == 1 && 2 != 3", 1),
        ("3 > 2 ? 10 : 20", 10),
        ("int(2.9f) + (int) -2.9", 0),
        ("100 / 5 / 2", 10),
    ],
)
def test_whole_numbers_are_those_of_c(expression, value):
    assert sent(f"int32 x = {expression}; compressed = concat(x);") == [[value]]


@reference_only()
def test_functions_globals_filters_and_draws_keep_their_meaning():
    before = """
        param P { float above = 0.25; int32 times = 2; }
        float limit = 1e-1;          /* a global with a value
                                        is set before each call */
        uint1 large(float x) { return x > limit; }
        float sum(float a, float b) { return a + b; }
        float twice(float* v) { float total = reduce(v, sum) return total * 2; }
    """.replace("sum) return", "sum)\n return")
    text = f"""{before}
        void encode(float* gradient, uint8* compressed, P p) {{
            limit = limit + p.above;
            float* kept = filter(gradient, large);
            int32 count = kept.size;
            float total = twice(kept) * p.times;
            uint2* dice = map(gradient, throw);
            compressed = concat(count, total, dice, p.times);
        }}
        uint2 throw(float x) {{ return random<uint2>(1, 3); }}
    """
    made = compile_text(text)
    assert [field.name for field in fields(made)] == ["block", "above", "times", "seed"]
    payload, _ = made().encode(None, torch.tensor([0.3, 0.4, 2.0, -1.0] * 200))
    assert payload["count"].tolist() == [400]
    assert payload["total"].tolist() == [pytest.approx(4 * 480, rel=1e-6)]
    assert payload["times"].view(torch.uint8)[0] == 2
    dice = {
        int(byte) >> shift & 3 for byte in payload["dice"] for shift in (0, 2, 4, 6)
    }
    assert dice == {1, 2}
    assert made(above=1.0).encode(None, torch.tensor([0.3, 2.0]))[0][
        "count"
    ].tolist() == [1]


# ---- mistakes ------------------------------------------------------------------------

ENCODE = "void encode(float* gradient, uint8* compressed) {\n"
SYNTAX = {
    "a lone operator": (
        "float x = 3 + ;\n",
        "1:15: ';' does not fit here; expected",
        ";",
    ),
    "a stray character": (
        "float x = 3 @ 4;",
        "1:13: '@' is no part of the language",
        "@",
    ),
    "a brace left open": (
        "float f(float x) { return x;\n",
        "1:29: the text ends here",
        "",
    ),
    "two statements": (
        "float f(float x) { float y = x return y; }",
        "1:31: a semicolon",
        " r",
    ),
    "if": (
        "float f(float x) {\n  if (x > 0) return 1;\n}",
        "'if' is no part of the language; write cond",
        "if",
    ),
    "double": (
        "double x;",
        "no part of the language; the language computes in float",
        "double",
    ),
}


@pytest.mark.smoke
@each("case", SYNTAX)
def test_a_syntax_error_points_at_its_place(case):
    text, message, pointed = SYNTAX[case]
    with pytest.raises(InvalidSetting) as caught:
        compile_text(text)
    first, shown, caret = str(caught.value).split("\n")
    assert message in first
    line, column = (
        int(number) for number in re.findall(r"^<text>:(\d+):(\d+): ", first)[0]
    )
    assert shown == "    " + text.split("\n")[line - 1]
    assert shown[4:][column - 1 :].startswith(pointed)
    assert len(caret) == 4 + column
    assert caret.endswith("^")


TYPES = {
    "unknown name": ("uint8 q = levle;", "no levle; declare it"),
    "a close name": ("uint8 q = gradiemt.size;", "did you mean gradient?"),
    "no value yet": ("float x;\nfloat y = x;", "x has no value yet"),
    "too large": ("uint2 q = 5;", "5 does not fit uint2"),
    "array as number": ("float x = gradient;", "an array where a float is declared"),
    "number as array": ("float* x = 3.0;", "float where float* is declared"),
    "other array": (
        "uint2* x = gradient;",
        "an array of float32 where uint2* is declared",
    ),
    "vector arithmetic": ("float* x = gradient * 2;", "arithmetic on a whole vector"),
    "bits of a float": (
        "float x = reduce(gradient, add);\nint32 y = x << 1;",
        "shl takes",
    ),
    "whole division": (
        "int32 n = gradient.size;\nint32 m = 10 / n;",
        "whole numbers divided",
    ),
    "remainder": ("int32 n = gradient.size;\nint32 m = n % 3;", "no power of two"),
    "by zero": ("int32 n = 1 / 0;", "zero"),
    "undeclared": ("total = 1.0;", "no variable total; declare it"),
    "twice": ("float x = 1;\nfloat x = 2;", "a second x"),
    "too few": ("float x = reduce(gradient);", "reduce: missing a required argument"),
    "a member": ("float x = gradient.length;", "gradient.length; members are"),
    "no name": ("compressed = concat(gradient.size + 1);", "a field without a name"),
    "unused": ("reduce(gradient, add);", "reduce without a use"),
    "own fold": ("float x = reduce(gradient, product);", "give start="),
    "itself": ("float x = again(1.0);", "again called from within"),
    "arity": ("float x = product(1.0);", "product of 1 values; it takes 2"),
    "a global": ("float* x = map(gradient, count);", "changes the global counted"),
    "no function": ("float* x = map(gradient, 3);", "cannot be computed"),
    "shifted by less than nothing": ("int32 n = 1 << (0 - 1);", "a shift by -1 bits"),
    "nothing": ("float x = 1;", "encode assigns no uint8*"),
}
HELPERS = """
float counted;
float count(float x) { counted = 1; return x; }
float product(float a, float b) { return a * b; }
float again(float a) { return again(a); }
"""


@each("case", TYPES)
def test_a_type_error_has_the_texts_line(case):
    body, message = TYPES[case]
    with pytest.raises(InvalidSetting) as caught:
        compile_text(ENCODE + body + "\n}" + HELPERS)()
    first, shown, caret = str(caught.value).split("\n")
    assert message in first
    assert re.match(r"<text>:\d+:\d+: ", first)
    assert caret.strip() == "^"
    assert (
        shown.strip() in (ENCODE + body + HELPERS).split("\n")
        or shown.strip() == ENCODE.strip()
    )


def test_errors_name_the_text_that_they_are_in():
    bad = DECODE.read_text().replace("uint2* Q", "uint4* Q")
    with pytest.raises(
        InvalidSetting, match=r"<text>:7:\d+: an array of uint2 where uint4\*"
    ):
        compile_text(PRINTED, bad)(bitwidth=2)
    with pytest.raises(
        InvalidSetting, match=r"terngrad.compll:13:\d+: 300 does not fit uint8"
    ):
        compile_text(PRINTED)(bitwidth=300)
    with pytest.raises(InvalidSetting, match=r"nowhere\.compll"):
        compile_text(Path("nowhere.compll"))
    with pytest.raises(InvalidSetting, match="a text with encode"):
        compile_text("float x;")
    with pytest.raises(InvalidSetting, match="encode takes"):
        compile_text("void encode(float* gradient) { }")
