"""The back ends agree on random programs, bit for bit.

Compiling takes longer than all else, so the programs are drawn twice: first to be
compiled in one go, then to be compared. One that fails is shrunk by hypothesis,
compiled alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, note, settings

from gradwire.contract.spec import TensorSpec
from gradwire.dsl import render_cpp
from gradwire.dsl.build import Built
from gradwire.dsl.gpu.launch import Launcher
from gradwire.dsl.interp import Call
from gradwire.dsl.ir import Kernel, Op
from gradwire.dsl.program import Program
from gradwire.kernels import compiler
from gradwire_lab.laws.inputs import make_gradient
from gradwire_lab.laws.tolerance import same_bits
from tests.dsl.fuzz import EVERYTHING, FOLDS, made, sources

needs_compiler = pytest.mark.skipif(
    compiler.find_compiler() is None, reason="no C++ compiler"
)

GRADIENTS = (
    ("normal", 1),
    ("one nan", 64),
    ("wide", 129),
    ("both infs", 300),
    ("zeros", 65),
    ("huge", 200),
)
NUM_PROGRAMS = 12
Visit = Callable[[Program], object]


def each(
    visit: Visit,
    folds: tuple[str, ...] = (*FOLDS, "add"),
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Draws programs, the same ones every time, and visits them; a failing one is
    shrunk.
    """

    @settings(
        max_examples=num_programs,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(sources(folds))
    @example(EVERYTHING)
    def drawn(source: str) -> None:
        note(source)
        visit(made(source))

    drawn()


def drawn_programs() -> list[Program]:
    found: list[Program] = []
    each(found.append)
    return list(dict.fromkeys(found))


def compiled_together(codecs: list[Program]) -> None:
    """One library for all that ``outcome`` runs."""
    together = Built(*(kernel for codec in codecs for kernel in used(codec)))
    assert together.library() is not None
    for codec in codecs:
        object.__setattr__(codec.kernels(), "built", together)


def used(codec: Program) -> list[Kernel]:
    """The kernels that ``outcome`` runs: all but the plain encode, and decode beside
    merge.
    """
    plain = codec.kernels().encode.name, codec.kernels().decode.name
    last = codec.kernels().merge.name
    return [
        k
        for k in codec.kernels().built.kernels
        if k.name not in plain or k.name == last
    ]


def outcome(codec: Program, kind: str, numel: int) -> dict[str, torch.Tensor]:
    """All that a program writes for one gradient."""
    grad_N = make_gradient(kind, numel, torch.float32, seed=numel)
    residual_N = make_gradient("normal", numel, torch.float32, seed=5)
    state = codec.init(TensorSpec("w", numel))
    payload, _ = codec.encode(state, grad_N, residual_N=residual_N)
    sum_N = torch.ones(numel)
    codec.merge(payload, sum_N, scale=0.3)
    fields = {field.name: payload[field.name] for field in payload.format}
    # What is no number has no sign that back ends agree on.
    return {**fields, "residual": residual_N, "sum": sum_N.nan_to_num(3.3e38)}


def compare(codec: Program, gradients: tuple[tuple[str, int], ...] = GRADIENTS) -> None:
    for kind, numel in gradients:
        ours = outcome(codec, kind, numel)
        with compiler.reference_only():
            theirs = outcome(codec, kind, numel)
        for name in theirs:
            assert same_bits(ours[name], theirs[name]), (
                f"{name} of {numel} elements, {kind}"
            )


@needs_compiler
@pytest.mark.timeout(400)  # of a failure: shrinking compiles each program that it tries
def test_cpp_is_the_interpreter() -> None:
    compiled_together(drawn_programs())
    each(compare)


class Triton(Built):
    """Runs kernels by Triton where ``Built`` runs them by C++."""

    def run_many(self, kernel: Kernel, calls: Sequence[Call]) -> list[int]:
        if compiler._state["forced"]:
            return super().run_many(kernel, calls)
        launcher = Launcher(*self.kernels)
        return [launcher.run_many(kernel, [call])[0] for call in calls]


@pytest.mark.timeout(400)
@pytest.mark.skipif(find_spec("triton") is None, reason="no triton")
def test_triton_is_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On what has no sum of floats, which Triton may add in another order
    (test_triton.py).
    """
    if torch.cuda.is_available():
        pytest.skip("outcome's tensors lie on the CPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def visit(codec: Program) -> None:
        made = codec.kernels()
        object.__setattr__(made, "built", Triton(*made.built.kernels))
        compare(codec, (("one nan", 64), ("both infs", 200)))

    with np.errstate(all="ignore"):
        each(visit, FOLDS, 4)


WRONG = {
    Op.SMALLER: "gw::greater({}, {})",
    Op.MUL: "{} + {}",
    Op.SHR: "{} >> (({} + 1) & 31)",
}


@needs_compiler
@pytest.mark.parametrize("number", range(-1, len(WRONG)))
def test_a_wrong_line_in_the_table_of_cpp_is_found(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compiler, "FLAG_SETS", (("-std=c++17", "-O0", "-fPIC", "-shared"),)
    )
    # rendered here for the first time
    codec = replace(made(EVERYTHING), block=256 + 64 * number)
    if number < 0:
        compare(codec)
        return
    op, wrong = [*WRONG.items()][number]
    monkeypatch.setitem(render_cpp._TEXT, op, wrong)
    with pytest.raises(AssertionError, match=" elements, "):
        compare(codec)
