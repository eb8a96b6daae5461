"""Kernels that keep some elements: C++ leaves what the interpreter leaves, in the same order."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gradwire.dsl.build import Built, Call
from gradwire.dsl.interp import Draws
from gradwire.dsl.ir import (
    FLOAT32,
    INT32,
    Buffer,
    DType,
    Extent,
    Fold,
    Kernel,
    Node,
    Op,
    const,
    load_buffer,
    node,
    store,
)
from gradwire.kernels import compiler
from gradwire_lab.laws.inputs import make_gradient
from gradwire_lab.laws.tolerance import same_bits
from tests.each import each

pytestmark = pytest.mark.skipif(compiler.find_compiler() is None, reason="no C++ compiler")

GRADIENT = Buffer("gradient", FLOAT32, Extent.ELEMENT)
RESIDUAL = Buffer("residual", FLOAT32, Extent.ELEMENT)
MEAN = Buffer("mean", FLOAT32, Extent.BLOCK)
INDICES = Buffer("indices", INT32, Extent.KEPT)
VALUES = Buffer("values", FLOAT32, Extent.KEPT)
CODES = Buffer("codes", DType.UINT2, Extent.KEPT)
RECORDS = {INDICES: torch.int32, VALUES: torch.float32, CODES: torch.uint8}


def keeping(name: str, keep: Node, block: int, *more: Node) -> Kernel:
    """Sends place, value and a code of the kept elements; the residual keeps the others."""
    value = load_buffer(GRADIENT)
    code = node(Op.CAST, value, dtype=DType.UINT2)
    left = node(Op.WHERE, keep, const(0.0, FLOAT32), value)
    stores = (
        store(INDICES, node(Op.PLACE), keep),
        store(VALUES, value, keep),
        store(CODES, code, keep),
        store(RESIDUAL, left),
        *more,
    )
    buffers = (GRADIENT, RESIDUAL, MEAN, INDICES, VALUES, CODES)
    return Kernel(name, block, buffers, stores)


def above(bound: float, name: str, block: int) -> Kernel:
    return keeping(name, node(Op.LESS, const(bound, FLOAT32), load_buffer(GRADIENT)), block)


def above_mean(name: str, block: int) -> Kernel:
    """What is kept, and a value of what is kept, wait for a reduction."""
    body = node(Op.ADD, *(node(Op.ARG, dtype=FLOAT32, arg=i) for i in (0, 1)))
    total = node(
        Op.REDUCE, load_buffer(GRADIENT), const(True, DType.BOOL), dtype=FLOAT32, arg=Fold(body, 0)
    )
    mean = node(Op.DIV, total, node(Op.CAST, node(Op.SIZE), dtype=FLOAT32))
    return keeping(name, node(Op.LESS, mean, load_buffer(GRADIENT)), block, store(MEAN, mean))


KERNELS = {
    kernel.name: kernel
    for kernel in (
        above(1.0, "few", 128),
        above(-10.0, "all_but_nan", 16384),
        above(100.0, "none", 64),
        above_mean("half", 256),
    )
}
BUILT = Built(*KERNELS.values())


def operands_of(grad_N: Tensor, kernel: Kernel) -> dict[str, Tensor]:
    numel = grad_N.numel()
    means_B = torch.full((-(-numel // kernel.block),), 77.0)
    kept = {b.name: torch.full((numel,), 77, dtype=dtype) for b, dtype in RECORDS.items()}
    return {"gradient": grad_N, "residual": torch.ones(numel), "mean": means_B, **kept}


def outcome(kernel: Kernel, grads: list[Tensor]) -> list[Tensor]:
    """What is written for each gradient, the kept elements with their number."""
    calls = [Call(operands_of(grad_N, kernel), grad_N.numel()) for grad_N in grads]
    counts = BUILT.run_many(kernel, calls)
    found = []
    for call, count in zip(calls, counts, strict=True):
        written = {**call.operands, "count": torch.tensor([count])}
        for buffer in RECORDS:
            written[buffer.name] = written[buffer.name][:count]
        found += list(written.values())
    return found


def assert_agreement(kernel: Kernel, grads: list[Tensor]) -> None:
    cpp = outcome(kernel, grads)
    with compiler.reference_only():
        reference = outcome(kernel, grads)
    for number, (a, b) in enumerate(zip(cpp, reference, strict=True)):
        assert same_bits(a, b), f"{kernel.name}, value {number}: {a} != {b}"


@each("name", KERNELS)
def test_kept_elements_are_the_interpreter_s(name: str) -> None:
    assert BUILT.library() is not None
    for kind, numel in itertools.product(("normal", "one nan", "both infs"), (1, 64, 300, 40_000)):
        assert_agreement(KERNELS[name], [make_gradient(kind, numel, torch.float32, seed=numel)])


def test_places_are_drawn_and_read_as_the_interpreter_does() -> None:
    """A sample: elements of the whole gradient, at places drawn below its length."""
    count = Buffer("count", INT32, Extent.CALL)
    whole = Buffer("whole", FLOAT32, Extent.CALL)
    sample = Buffer("sample", FLOAT32, Extent.ELEMENT)
    place = node(Op.BELOW, load_buffer(count), arg=3)
    value = node(Op.LOAD_AT, place, dtype=FLOAT32, arg=whole)
    kernel = Kernel("sampled", 128, (count, whole, sample), (store(sample, value),))
    built = Built(kernel)
    assert built.library() is not None
    for numel in (1, 7, 1_000_003):
        drawn = []
        for _ in range(2):
            whole_N, drawn_K = torch.arange(float(numel)), torch.full((301,), -1.0)
            operands = {"count": torch.tensor([numel], dtype=torch.int32), "whole": whole_N}
            with compiler.reference_only() if drawn else torch.no_grad():
                built.run(kernel, {**operands, "sample": drawn_K}, 301, Draws(5 + (7 << 32), 11))
            drawn.append(drawn_K)
        assert same_bits(*drawn)
        assert numel == 1 or drawn[0].unique().numel() > 5
