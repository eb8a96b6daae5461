"""Random programs: their text is drawn, so that a failing one is read as it stands and
shrinks.

A program has reductions with conditions and several folds, some over the whole
gradient; fields of every width, or kept elements; and a decode of all that. Values are
float32, int32 or conditions, each by every operation the language has for it. ``known``
are names of values computed before.
"""

from __future__ import annotations

import functools
from zlib import crc32

from hypothesis import strategies as st

from gradwire.contract import Layout
from gradwire.dsl import language
from gradwire.dsl.program import Program

Text = st.SearchStrategy[str]

FOLDS = ("smaller", "greater", "largest, 0.0", "product, 1.0")
"""Folds whose result does not depend on how a sum is rounded."""
WHOLE_FOLDS = (
    "smaller",
    "greater",
    "add",
    "lambda a, b: a | b, 0",
    "lambda a, b: a & b, -1",
)

_PRELUDE = {name: getattr(language, name) for name in language.__all__} | {
    "Program": Program,
    "Layout": Layout,
    "largest": lambda a, b: language.where(abs(a) < abs(b), b, a),
    "product": lambda a, b: a * b,
}


EVERYTHING = """\
class fuzz(Program):
    def encode(self, gradient):
        middle = pick(sort(sample(map(gradient, abs), 0.3), smaller), 0.5)
        large = filter(gradient, lambda x: (abs(x) > middle) | ~finite(x))
        most = whole(reduce(large, largest, 0.0), greater)
        share = size(large) / size(gradient)
        def code(x):
            n = int32(round(x * share)) << 1 >> 2
            drawn = sqrt(abs(x)) + random()
            return where((n < 9) & (n != 4), drawn, floor(-x - most * share))
        q = map(gradient, lambda x: uint4(greater(code(x), smaller(x, 2.0))))
        return concat(most=most, share=share, odd=uint1(size(large) & 1 | 0), q=q)
    def decode(self, sent):
        most, share, odd, q = extract(sent)
        return map(q, lambda q: where(odd == 1, most - share, q / most))
"""
"""A program with most operations that random ones may lack."""


@functools.cache
def made(source: str) -> Program:
    """The program of a text that ``sources`` drew; its name is its own, in C++ too."""
    name = f"p{crc32(source.encode()):08x}"
    namespace = dict(_PRELUDE)
    exec(
        compile(source.replace("class fuzz", f"class {name}"), name, "exec"), namespace
    )
    return namespace[name](block=128)


def _joined(pattern: str, *parts: Text) -> Text:
    """``pattern`` with its braces filled in."""
    return st.tuples(*parts).map(lambda found: pattern.format(*found))


def _any_of(*patterns: str, a: Text, b: Text) -> list[Text]:
    return [_joined(p, *(a, b)[: p.count("{}")]) for p in patterns]


@functools.cache
def floats(depth: int, known: tuple[str, ...], draws: bool = True) -> Text:
    """float32 expressions of the element x."""
    leaves = [
        st.just("x"),
        st.sampled_from(["0.5", "-2.0", "1e-3", "1e30"]).map("float32({})".format),
        *([st.sampled_from(known)] if known else []),
        *([st.just("random(-1.0, 1.0)")] if draws else []),
    ]
    if not depth:
        return st.one_of(leaves)
    a, n = floats(depth - 1, known, draws), ints(depth - 1, known, draws)
    both = (
        "({} + {})",
        "({} - {})",
        "({} * {})",
        "({} / {})",
        "smaller({}, {})",
        "greater({}, {})",
    )
    one = ("-{}", "abs({})", "floor({})", "round({})", "sqrt({})")
    return st.one_of(
        *leaves,
        *_any_of(*both, *one, a=a, b=a),
        _joined("where({}, {}, {})", conditions(depth - 1, known, draws), a, a),
        _joined("float32({})", n),
    )


@functools.cache
def ints(depth: int, known: tuple[str, ...], draws: bool = True) -> Text:
    """int32 expressions of the element x."""
    leaf = st.sampled_from([0, 1, 7, -3, 2**31 - 1]).map("int32({})".format)
    if not depth:
        return leaf
    a, x = ints(depth - 1, known, draws), floats(depth - 1, known, draws)
    both = (
        "({} + {})",
        "({} - {})",
        "({} * {})",
        "({} & {})",
        "({} | {})",
        "smaller({}, {})",
    )
    one = ("-{}", "abs({})", "({} << 3)", "({} >> 1)", "(int32(6) >> {})")
    kinds = (
        "int32({})",
        "(uint1({}) + 0)",
        "(uint4({}) * 2)",
        "(uint8({}) - 9)",
        "-uint_3({})",
    )
    return st.one_of(
        leaf,
        *_any_of(*kinds, a=x, b=x),
        *_any_of(*both, "greater({}, {})", *one, a=a, b=a),
        _joined("where({}, {}, {})", conditions(depth - 1, known, draws), a, a),
    )


@functools.cache
def conditions(depth: int, known: tuple[str, ...], draws: bool = True) -> Text:
    """Conditions on the element x."""
    x, n = (
        floats(max(0, depth - 1), known, draws),
        ints(max(0, depth - 1), known, draws),
    )
    leaves = [
        *_any_of("({} < {})", "({} >= {})", "({} == {})", "finite({})", a=x, b=x),
        *_any_of("({} <= {})", "({} != {})", a=n, b=n),
    ]
    if not depth:
        return st.one_of(leaves)
    a = conditions(depth - 1, known, draws)
    return st.one_of(*leaves, *_any_of("({} & {})", "({} | {})", "~{}", a=a, b=a))


@st.composite
def sources(draw: st.DrawFn, folds: tuple[str, ...] = FOLDS, depth: int = 2) -> str:
    """The text of a class called fuzz."""
    known: list[str] = []
    body: list[str] = []
    if draw(st.integers(0, 3)) == 3:
        known.append("middle")
        body.append("middle = pick(sort(sample(gradient, 0.3), smaller), 0.5)")
    for number in range(draw(st.integers(0, 2))):
        name, before = f"s{number}", tuple(known)
        vector = f"map(gradient, lambda x: {draw(floats(depth, before))})"
        if draw(st.booleans()):
            vector = f"filter({vector}, lambda x: {draw(conditions(1, before))})"
        body.append(f"{name} = reduce({vector}, {draw(st.sampled_from(folds))})")
        if draw(st.integers(0, 3)) == 3:
            body.append(
                f"{name} = whole({name}, "
                f"{draw(st.sampled_from(('smaller', 'greater')))})"
            )
        known.append(name)
    if draw(st.booleans()):
        condition = draw(conditions(1, tuple(known)))
        body.append(f"bits = map(gradient, lambda x: {draw(ints(1, tuple(known)))})")
        body.append(
            f"bits = filter(bits, lambda n: {condition.replace('x', 'float32(n)')})"
        )
        body.append(f"n = reduce(bits, {draw(st.sampled_from(WHOLE_FOLDS))})")
        body.append("count = size(bits)")
        known += ["n", "count"]
    kept = draw(st.integers(0, 3)) == 3
    tail = _kept(draw, known, depth) if kept else _dense(draw, known, depth)
    trait = ", layout=Layout.SPARSE, exact_size=False" if kept else ""
    lines = [f"class fuzz(Program{trait}):", "    def encode(self, gradient):"]
    lines += [f"        {line}" for line in body]
    return "\n".join([*lines, *tail]) + "\n"


_KINDS = ("uint8", "uint1", "uint2", "uint4", "uint_3", "int32", "float32")


def _dense(draw: st.DrawFn, known: list[str], depth: int) -> list[str]:
    names = ["p", "q"][: draw(st.integers(1, 2))]
    scope = tuple(known)
    codes = []
    for name in names:
        kind, value = draw(st.sampled_from(_KINDS)), draw(floats(depth, scope))
        codes.append(f"{name}=map(gradient, lambda x: {kind}({value}))")
    fields = ", ".join([*(f"{name}={name}" for name in known), *codes])
    value = draw(
        floats(depth, (*known, *(f"float32({name})" for name in names[1:])), False)
    )
    vectors = f"({', '.join(names)},)"
    return [
        f"        return concat({fields})",
        "    def decode(self, sent):",
        f"        {', '.join([*known, *names])}, = extract(sent)",
        f"        return map({vectors}, lambda "
        f"{', '.join(names).replace('p', 'x', 1)}: {value})",
    ]


def _kept(draw: st.DrawFn, known: list[str], depth: int) -> list[str]:
    condition = draw(conditions(depth, tuple(known)))
    lines = [f"        kept = filter(gradient, lambda x: {condition})"]
    if draw(st.booleans()):
        lines.append("        kept = top(kept, 0.1)")
    kind = draw(st.sampled_from(("float32", "uint4", "uint8")))
    called = [name for name in known if f"{name} = whole" in "".join(lines)]
    fields = ", ".join([*(f"{name}={name}" for name in known), "indices=indices(kept)"])
    value = draw(floats(1, tuple(called), False))
    return [
        *lines,
        f"        return concat({fields}, values=map(kept, {kind}))",
        "    def decode(self, sent):",
        f"        {', '.join([*known, 'places', 'values'])} = extract(sent)",
        f"        return scatter(places, map(values, lambda x: {value}))",
    ]
