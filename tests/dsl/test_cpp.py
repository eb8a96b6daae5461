"""C++ and the interpreter agree bit for bit on the programs here; drawn ones are in
test_fuzz.
"""

from __future__ import annotations

import itertools
import platform
from typing import Any

import pytest
import torch

from gradwire.compress.fp8 import fp8
from gradwire.compress.int8 import int8
from gradwire.compress.uniform import uniform
from gradwire.dsl import language as gl
from gradwire.dsl.build import Built
from gradwire.dsl.interp import Draws
from gradwire.dsl.ir import (
    FLOAT32,
    INT32,
    Buffer,
    Extent,
    Kernel,
    Op,
    load_buffer,
    node,
    store,
)
from gradwire.dsl.program import Program
from gradwire.kernels import compiler
from gradwire_lab.compress.qsgd import qsgd
from gradwire_lab.compress.terngrad import terngrad
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.laws.inputs import WIDE_KINDS, make_gradient
from gradwire_lab.laws.tolerance import same_bits
from tests.dsl.single_runs import run_of
from tests.dsl.test_language import program
from tests.each import each

pytestmark = pytest.mark.skipif(
    compiler.find_compiler() is None, reason="no C++ compiler"
)

KINDS = (
    "normal",
    "wide",
    "zeros",
    "equal",
    "one nan",
    "both infs",
    "huge",
    *WIDE_KINDS,
)


def one_nan(vector: torch.Tensor) -> torch.Tensor:
    """What is no number has the same bits everywhere: signs of NaN differ between
    vector units.
    """
    return vector.nan_to_num(
        nan=float("nan"), posinf=float("inf"), neginf=float("-inf")
    )


def outcome(codec: Program, built: Built, grad_N: torch.Tensor) -> list[torch.Tensor]:
    """All that a compressor's kernels write for one gradient."""
    made, numel = codec.kernels(), grad_N.numel()
    spec = codec.format(type("spec", (), {"numel": numel}))
    residual_N = make_gradient("normal", numel, torch.float32, seed=5)
    fields = {f.name: torch.full((f.numel,), 77, dtype=f.dtype) for f in spec}
    operands = {"gradient": grad_N, "residual": residual_N, **fields}
    run_of(built)(made.encode_with_residual, operands, numel, Draws(3 + (9 << 32), 2))
    sum_N = torch.ones(numel)
    run_of(built)(
        made.merge,
        {"sum": sum_N, "scale": torch.tensor([0.3]), **fields},
        numel,
        Draws(),
    )
    return [residual_N, one_nan(sum_N), *fields.values()]


def assert_agreement(codec: Program, built: Built, numels: tuple[int, ...]) -> None:
    for kind, numel in itertools.product(KINDS, numels):
        grad_N = make_gradient(kind, numel, torch.float32, seed=numel)
        cpp = outcome(codec, built, grad_N)
        with compiler.reference_only():
            reference = outcome(codec, built, grad_N)
        for a, b in zip(cpp, reference, strict=True):
            assert same_bits(a, b), f"{codec!r} on {numel} elements, {kind}"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize(
    "flags", [(), ("-mavx2",)], ids=["no vectors wider than SSE2", "AVX2"]
)
def test_narrower_vectors_have_the_same_bits(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "FLAG_SETS", ((*compiler.BASE_FLAGS, *flags),))
    monkeypatch.setattr(compiler, "_loaded", {})
    codecs = (qsgd(), uniform(bitwidth=1), terngrad(), int8(), fp8(), threelc())
    forms = [
        form
        for c in codecs
        for form in (c.kernels().encode_with_residual, c.kernels().merge)
    ]
    together = Built(*forms)
    assert together.library() is not None
    for codec in codecs:
        assert_agreement(codec, together, (1, 65, 1000))


def test_a_minus_of_a_minus_is_no_decrement() -> None:
    def negative(x: gl.Scalar) -> gl.Scalar:
        return -x

    class twice(Program):
        def encode(self, gradient):
            top = gl.reduce(gradient, lambda a, b: gl.greater(negative(-a), b), -1e38)
            low = gl.reduce(gradient, gl.smaller)
            return gl.concat(top=top, low=negative(-low), q=gl.map(gradient, gl.uint1))

        def decode(self, compressed):
            top, low, q = gl.extract(compressed)
            return gl.map(q, lambda bit: bit * top - -low)

    assert_agreement(twice(block=64), twice(block=64).kernels().built, (65, 300))


@each("start", [3.4028235e38, 1e39, 1e300, 10**40])
def test_a_start_beyond_float32_is_rounded_as_constants_are(start: Any) -> None:
    codec = program(
        lambda self, g: gl.concat(
            least=gl.reduce(g, lambda a, b: gl.where(a < b, a, b), start),
            q=gl.map(g, lambda x: gl.uint1(x > 0)),
        ),
        lambda self, sent: gl.map(
            gl.extract(sent)[1], lambda q: q * gl.extract(sent)[0]
        ),
    )
    grad_N = torch.tensor([3.0, -2.0, 5.0])
    compiled = codec.encode(None, grad_N)[0].buffer
    with compiler.reference_only():
        interpreted = codec.encode(None, grad_N)[0].buffer
    assert torch.equal(compiled, interpreted)
    assert compiled[:4].view(torch.float32).item() == -2.0


def test_equal_settings_are_one_program_in_either_order() -> None:
    """-0.0 equals 0.0, so the second that is made would be given the first one's
    kernels.
    """

    def made() -> Any:
        class inverse(Program):
            s: float = 0.0

            def encode(self, g: Any) -> Any:
                return gl.concat(q=gl.map(g, lambda x: x * 0 + 1 / gl.float32(self.s)))

            def decode(self, sent: Any) -> Any:
                return gl.map(gl.extract(sent)[0], lambda q: q)

        return inverse

    def sent(codec: Any) -> list[int]:
        numbers: list[int] = codec.encode(None, torch.ones(1))[0].buffer.tolist()
        return numbers

    first, second = made(), made()
    assert [sent(first(s=0.0)), sent(first(s=-0.0))] == [
        sent(second(s=s)) for s in (-0.0, 0.0)
    ]


def test_places_are_drawn_and_read_as_the_interpreter_does() -> None:
    """A sample: elements of the whole gradient, at places drawn below its length, which
    is long.
    """
    count = Buffer("count", INT32, Extent.CALL)
    whole = Buffer("whole", FLOAT32, Extent.CALL)
    sample = Buffer("sample", FLOAT32, Extent.ELEMENT)
    place = node(Op.BELOW, load_buffer(count), arg=3)
    value = node(Op.LOAD_AT, place, dtype=FLOAT32, arg=whole)
    kernel = Kernel("sampled", 128, (count, whole, sample), (store(sample, value),))
    built = Built(kernel)
    assert built.library() is not None
    for numel in (7, 1_000_003):
        drawn = []
        for _ in range(2):
            whole_N, drawn_K = torch.arange(float(numel)), torch.full((301,), -1.0)
            operands = {
                "count": torch.tensor([numel], dtype=torch.int32),
                "whole": whole_N,
            }
            with compiler.reference_only() if drawn else torch.no_grad():
                run_of(built)(
                    kernel,
                    {**operands, "sample": drawn_K},
                    301,
                    Draws(5 + (7 << 32), 11),
                )
            drawn.append(drawn_K)
        assert same_bits(*drawn)
        assert drawn[0].unique().numel() > 5
