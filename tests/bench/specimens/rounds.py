"""Kernels that round in another way than is written, which the law of launches must
reject.
"""

from __future__ import annotations

from importlib.util import find_spec

from gradwire_bench.micro.ahead import Launch

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def fuses(x, y, out, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        one = tl.load(x + i)
        tl.store(out + i, tl.fma(one, tl.load(y + i), one))

    @triton.jit
    def divides(x, y, out, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i) / tl.load(y + i))

    @triton.jit
    def approximates(x, y, out, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.sqrt(tl.load(x + i)) + tl.exp2(tl.load(y + i)))

    @triton.jit
    def flushes(x, y, out, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        text: tl.constexpr = "add.ftz.f32 $0, $1, $2;"
        given = [tl.load(x + i), tl.load(y + i)]
        tl.store(
            out + i,
            tl.inline_asm_elementwise(text, "=f,f,f", given, tl.float32, True, 1),
        )


EXPECTED = {
    "rounds/fuses": "fma",
    "rounds/divides": "full",
    "rounds/approximates": "approx",
    "rounds/flushes": "ftz",
}
"""The launches by name, and a part of an instruction that the law finds in each."""


def launches() -> list[Launch]:
    """A launch of each kernel."""
    types = dict.fromkeys(("x", "y", "out"), "*fp32")
    kernels = fuses, divides, approximates, flushes
    return [
        Launch(name, lambda kernel=kernel: kernel, types, {"BLOCK": 128})  # type: ignore[misc]
        for name, kernel in zip(EXPECTED, kernels, strict=True)
    ]
