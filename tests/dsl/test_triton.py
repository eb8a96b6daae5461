"""Triton and the interpreter agree: bit for bit, but for sums of floats that cancel.

Where there is no GPU, under Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.compress.int8 import int8
from gradwire.compress.onebit import onebit
from gradwire.compress.uniform import uniform
from gradwire.contract import registry as load
from gradwire.contract.spec import TensorSpec
from gradwire.dsl import generated, interp
from gradwire.dsl import language as gl
from gradwire.dsl.build import Built
from gradwire.dsl.gpu import launch as gpu_build
from gradwire.dsl.gpu.launch import Launcher
from gradwire.dsl.gpu.render import WHOLE
from gradwire.dsl.interp import Call, Draws
from gradwire.dsl.ir import Kernel
from gradwire.dsl.operators import Operator
from gradwire.dsl.program import Program
from gradwire_lab.compress.dgc import dgc
from gradwire_lab.compress.qsgd import qsgd
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.dsl import runs_launch
from gradwire_lab.dsl.coders import Coder
from gradwire_lab.laws.inputs import WIDE_KINDS, make_gradient
from gradwire_lab.laws.tolerance import same_bits
from gradwire_lab.library.zero_run import zero_run
from tests.dsl.single_runs import run_of
from tests.dsl.test_cpp import one_nan
from tests.each import each
from tests.laws.cases import of_library

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no triton"),
    pytest.mark.usefixtures("triton_interpreted"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GENERATED = [
    *{
        type(one): one for one in load.examples("compress") if isinstance(one, Program)
    }.values()
]
"""One of each file."""


def outcome(codec: Program, run: Any, grad_N: Tensor) -> dict[str, Tensor]:
    """All that a compressor's kernels write for one gradient, by buffer."""
    made, numel, device = codec.kernels(), grad_N.numel(), grad_N.device
    residual_N = make_gradient("normal", numel, torch.float32, seed=5).to(device)
    format = codec.format(TensorSpec("g", numel, torch.float32))
    fields = {
        f.name: torch.full((f.numel,), 77, dtype=f.dtype, device=device) for f in format
    }
    operands = {"gradient": grad_N, "residual": residual_N, **fields}
    run(made.encode_with_residual, operands, numel, Draws(3 + (0xFFFFFFF9 << 32), 2))
    sum_N = torch.ones(numel, device=device)
    scale = torch.tensor([0.3], device=device)
    run(made.merge, {"sum": sum_N, "scale": scale, **fields}, numel, Draws())
    return {"residual": residual_N, "sum": one_nan(sum_N), **fields}


def assert_agreement(codec: Program, launcher: Launcher, kind: str, numel: int) -> None:
    grad_N = make_gradient(kind, numel, torch.float32, seed=numel)
    ours = outcome(codec, run_of(launcher), grad_N.to(DEVICE))
    for name, want in outcome(codec, interp.run, grad_N).items():
        assert same_bits(ours[name].cpu(), want), (
            f"{codec!r}, {numel} of {kind}: {name}"
        )


def launcher_of(*codecs: Program) -> Launcher:
    made = [codec.kernels() for codec in codecs]
    return Launcher(*(form for k in made for form in (k.encode_with_residual, k.merge)))


@each("numel", [2 * WHOLE - 3, 2 * WHOLE + 5])
def test_blocks_of_several_tiles_have_the_same_bits(numel: int) -> None:
    codec = onebit(block=2 * WHOLE)
    launcher = launcher_of(codec)
    assert " for at in range(" in launcher.text
    assert_agreement(codec, launcher, "normal", numel)


class sums(Program):
    """The sum of each block."""

    block: int = 4096

    def encode(self, gradient: gl.Vector) -> gl.Compressed:
        zeros = gl.map(gradient, lambda x: gl.uint1(x * 0))
        return gl.concat(total=gl.reduce(gradient, gl.add), zeros=zeros)

    def decode(self, compressed: gl.Compressed) -> gl.Vector:
        total, zeros = gl.extract(compressed)
        return gl.map(zeros, lambda zero: total)


def test_sums_that_cancel_are_off_by_no_more_than_stated() -> None:
    half_N = (
        make_gradient("normal", 2048, torch.float32)
        * 2.0 ** torch.arange(2048).div(32).floor()
    )
    mixed_N = torch.randperm(4096, generator=torch.Generator().manual_seed(3))
    tiny_N = make_gradient("normal", 4096, torch.float32, seed=1) * 1e-6
    grad_N = torch.cat([half_N, -half_N])[mixed_N] + tiny_N
    kernel, totals = sums().kernels().encode, {}
    for run, device in (
        (run_of(Launcher(kernel)), DEVICE),
        (interp.run, torch.device("cpu")),
    ):
        total = torch.zeros(1, device=device)
        zeros = torch.zeros(512, dtype=torch.uint8, device=device)
        run(
            kernel,
            {"gradient": grad_N.to(device), "total": total, "zeros": zeros},
            4096,
            Draws(),
        )
        totals[run] = float(total)
    ours, theirs = totals.values()
    allowed = 2 * 4096 * 2.0**-53 * float(grad_N.double().abs().sum())
    assert ours != theirs  # else this shows nothing
    assert abs(ours - theirs) <= allowed + 2.0**-23 * abs(theirs)


copysign = Operator(
    "copysign",
    operands=(gl.float32, gl.float32),
    result=gl.float32,
    interp=torch.copysign,
    cpp="__builtin_copysignf({}, {})",
    triton="tl.where({1}.to(tl.int32, bitcast=True) < 0, -tl.abs({0}), tl.abs({0}))",
)


class terms(Program):
    """What is an operand like any other, and needs care in a text."""

    block: int = 128

    def encode(self, gradient: gl.Vector) -> gl.Compressed:
        def value(x: gl.Scalar) -> gl.Scalar:
            signs = copysign(1, x) + copysign(-x, 2.0) + copysign(1e-40, x)
            return signs * gl.float32(~(x > 0)) - gl.smaller(1e-40, x) / -3

        return gl.concat(values=gl.map(gradient, value))

    def decode(self, compressed: gl.Compressed) -> gl.Vector:
        (values,) = gl.extract(compressed)
        return gl.map(values, lambda value: -gl.round(value) * gl.floor(-value / 3))


@each("kind", ["normal", "tiny", "both infs"])
def test_operands_of_all_kinds_have_the_same_bits(kind: str) -> None:
    assert_agreement(terms(), launcher_of(terms()), kind, 200)


# ---- compressors, end to end ---------------------------------------------------------


def launched(built: Built, kernel: Kernel, calls: tuple[Call, ...]) -> list[int]:
    """``Built.run_many`` as on a GPU."""
    return built.launcher.run_many(kernel, calls)


def exchanged(
    codec: Program, grad_N: Tensor, residual_N: Tensor | None
) -> dict[str, Tensor]:
    """What a compressor makes of a gradient, its residual and a sum."""
    state = codec.init(TensorSpec("layer.weight", grad_N.numel(), torch.float32))
    payload, _ = codec.encode(state, grad_N, residual_N=residual_N)
    assert payload.buffer is not None
    sum_N = torch.ones_like(grad_N)
    codec.merge(payload, sum_N, scale=0.3)
    decoded_N = codec.decode(payload, torch.empty_like(grad_N))
    made = {
        "bytes": payload.buffer,
        "sum": one_nan(sum_N),
        "decoded": one_nan(decoded_N),
    }
    return made if residual_N is None else {**made, "residual": residual_N}


PANEL = (
    ("normal", 1000, True),
    ("both infs", 300, True),
    ("huge", 65, False),
    *((kind, 300, True) for kind in WIDE_KINDS),
)
"""Kind and length of a gradient, and whether it has a residual."""


@pytest.mark.parametrize(
    "codec",
    [
        codec if of_library(codec) else pytest.param(codec, marks=pytest.mark.slow)
        for codec in GENERATED
    ],
    ids=repr,
)
def test_compressors_have_the_same_bits(
    codec: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_on(device: torch.device) -> list[dict[str, Tensor]]:
        return [
            exchanged(
                codec,
                make_gradient(kind, numel, torch.float32).to(device),
                make_gradient("wide", numel, torch.float32, seed=5).to(device)
                if left
                else None,
            )
            for kind, numel, left in PANEL
        ]

    wanted = made_on(torch.device("cpu"))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(Built, "run_many", launched)
    for case, ours, want in zip(PANEL, made_on(DEVICE), wanted, strict=True):
        assert ours.keys() == want.keys()
        for name in want:
            assert same_bits(ours[name].cpu(), want[name]), f"{codec!r}, {case}: {name}"


@each("codec", [c for c in GENERATED if c.traits.exact_size])
def test_all_that_a_compressor_makes_lies_with_its_gradient(
    codec: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that has no memory, and takes no operand that lies elsewhere."""
    device, dtype, kernels = torch.device("meta"), torch.bfloat16, list[str]()

    def run_many(built: Built, kernel: Kernel, calls: tuple[Call, ...]) -> list[int]:
        kernels.append(kernel.name)
        for call in calls:
            assert {b.name for b in kernel.buffers} <= call.tensors.keys()
            assert {tensor.device for tensor in call.tensors.values()} == {device}
        return [0 for _ in calls]

    monkeypatch.setattr(Built, "run_many", run_many)
    # refuses it for users
    monkeypatch.setattr(generated, "check_gradient", lambda grad_N: None)
    grad_N, residual_N, sum_N = (
        torch.empty(1000, dtype=dtype, device=device) for _ in range(3)
    )
    state = codec.init(TensorSpec("layer.weight", 1000, dtype))
    payload, _ = codec.encode(state, grad_N, residual_N=residual_N)
    codec.decode(payload, sum_N)
    codec.merge(payload, sum_N, scale=0.5)
    assert len(kernels) >= 3


class ordered(Program):
    """The median of magnitudes, and what is above it."""

    def encode(self, gradient: gl.Vector) -> gl.Compressed:
        cut = gl.pick(gl.sort(gl.map(gradient, abs), gl.smaller), 0.5)
        return gl.concat(bits=gl.map(gradient, lambda x: gl.uint1(x > cut)))

    def decode(self, compressed: gl.Compressed) -> gl.Vector:
        return gl.map(gl.extract(compressed)[0], lambda bit: bit)


def test_what_is_sorted_has_the_same_bits() -> None:
    (stage,) = ordered(block=128).kernels().stages
    form, found = stage.with_residual, []
    grad_N, residual_N = (
        make_gradient("normal", 300, torch.float32, seed=i) for i in (1, 2)
    )
    for run, device in (
        (interp.run, torch.device("cpu")),
        (run_of(Launcher(form)), DEVICE),
    ):
        operands = {
            "gradient": grad_N.to(device),
            "residual": residual_N.to(device),
            "sample": torch.zeros(300, device=device),
        }
        run(form, operands, 300, Draws())
        found.append(operands["sample"].cpu())
    assert same_bits(found[0], (grad_N + residual_N).abs())
    assert same_bits(*found)


# ---- what a compiler makes of it -----------------------------------------------------

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gradwire_lab.compress.dgc import dgc
from gradwire.compress.int8 import int8
from gradwire.compress.onebit import onebit
from gradwire_lab.compress.threelc import threelc
from gradwire.compress.uniform import uniform
from gradwire.dsl.gpu.launch import Launcher, launch_shape
from gradwire.dsl.ir import FLOAT32, INT32
from gradwire.dsl.gpu.render import counting, row

forms = [
    codec(block=4096).kernels().encode_with_residual
    for codec in (int8, onebit, uniform)
]
packed, kept = threelc(block=512).kernels(), dgc().kernels()
forms += [packed.encode, packed.merge, kept.encode, kept.stages[0].plain]
launcher = Launcher(*forms)
for form in (*forms, counting(kept.encode)):
    shape = launch_shape(row(form))
    warps = shape.pop("num_warps")
    pointers = {FLOAT32: "*fp32", INT32: "*i32"}
    types = {f"{b.name}_": pointers.get(b.dtype, "*u8") for b in form.buffers}
    types["num_elements"] = "i32"
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(types))}
    types |= dict.fromkeys(("key_low", "key_high", "step") if form.draws else (), "i32")
    types |= {"first": "*i32"} if form.keep else {}
    types |= dict.fromkeys(shape, "constexpr")
    source = ASTSource(getattr(launcher.module, form.name), types, shape, aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = triton.compile(source, GPUTarget("cuda", 80, 32), options)
    print(made.asm["ptx"].replace("\\n", " "))
"""


@pytest.mark.slow
def test_compiled_kernels_read_once_in_wide_loads_and_round_as_written(
    tmp_path: Path,
) -> None:
    """Compiled for a GPU, which need not be there."""
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    variables.pop("TRITON_INTERPRET", None)
    found = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=variables,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert found.returncode == 0, found.stderr
    texts = found.stdout.splitlines()
    assert len(texts) == 8
    for ptx in texts[:3]:
        # 4096 elements of a gradient and of a residual, by 256 threads, four to a load.
        assert ptx.count("ld.global.v4.b32") == 8
        assert ptx.count("st.global.v4.b32") >= 4
        assert "div.rn.f32" in ptx
    for ptx in texts:
        for bad in (
            "fma.",
            ".approx",
            ".ftz",
            "div.full",
            "atom.",
            "red.global",
            "ld.local",
        ):
            assert bad not in ptx, bad


# ---- text and dispatch ---------------------------------------------------------------


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Tensor]:
    """Operands of uniform's encode in 2 bits that do not count as the CPU's."""
    monkeypatch.setattr(Call, "on_cpu", False)
    codes = torch.zeros(25, dtype=torch.uint8, device=DEVICE)
    low, gap = torch.zeros(2, 1, device=DEVICE)
    grad_N = make_gradient("normal", 100, torch.float32).to(DEVICE)
    return {"gradient": grad_N, "low": low, "gap": gap, "codes": codes}


def test_what_does_not_lie_on_the_cpu_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operands, made = elsewhere(monkeypatch), uniform(bitwidth=2).kernels()
    kernels: list[str] = []
    real = Launcher.run_many

    def run_many(launcher: Launcher, kernel: Kernel, parts: Any) -> list[int]:
        kernels.append(kernel.name)
        return real(launcher, kernel, parts)

    monkeypatch.setattr(Launcher, "run_many", run_many)
    run_of(made.built)(made.encode, operands, 100, Draws())
    assert kernels == ["uniform_encode"]
    assert operands["codes"].any()


# ---- several tensors in one launch, and coders of runs -------------------------------

ODD, EVEN = (1, 300, 0, 65, 1000), (300, 0, 4, 128, 1000)
"""Elements of tensors; the even ones are read in vectors."""


def encoded(
    codec: Program, sizes: tuple[int, ...], device: torch.device
) -> list[Tensor]:
    """Payloads, residuals and decoded vectors of several gradients encoded in one
    call.
    """
    specs = [TensorSpec(f"layer {i}", numel) for i, numel in enumerate(sizes)]
    grads = [
        make_gradient("normal", n, torch.float32, seed=n).to(device) for n in sizes
    ]
    residuals = [
        make_gradient("wide", n, torch.float32, seed=5).to(device) for n in sizes
    ]
    states = [codec.init(spec) for spec in specs]
    sent = codec.encode_many(states, grads, residuals)
    outs = [torch.ones_like(grad_N) for grad_N in grads]
    codec.decode_many([payload for payload, _ in sent], outs, scale=0.5)
    buffers = [payload.buffer for payload, _ in sent if payload.buffer is not None]
    return [one.cpu() for one in (*buffers, *residuals, *outs)]


@pytest.mark.parametrize(
    ("codec", "sizes"),
    [
        (int8(block=64), ODD),
        (int8(block=64), EVEN),
        (qsgd(), EVEN),
        (threelc(block=128), ODD),
        (dgc(density=0.1), ODD),
    ],
    ids=repr,
)
def test_several_tensors_are_one_launch_and_have_the_bits_of_the_cpu(
    codec: Program, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = encoded(codec, sizes, torch.device("cpu"))
    launches: list[tuple[str, int]] = []
    real = Launcher._launch

    def counted(self: Launcher, plan: Any, live: Any) -> None:
        launches.append((plan.name, len(live)))
        real(self, plan, live)

    monkeypatch.setattr(Launcher, "_launch", counted)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(Built, "run_many", launched)
    found = encoded(codec, sizes, DEVICE)
    assert all(same_bits(ours, want) for ours, want in zip(found, wanted, strict=True))
    encodes = [num for name, num in launches if name.endswith("_encode_with_residual")]
    assert encodes == [4]  # one of five has no element
    if codec.traits.exact_size:
        assert all(num == 4 for _, num in launches)


def test_vectors_are_wide_only_where_memory_allows_it() -> None:
    kernel, memory = int8().kernels().merge, torch.zeros(64)
    scale, step, codes = (
        torch.ones(1),
        torch.ones(1),
        torch.zeros(64, dtype=torch.uint8),
    )

    def table(sum_N: Tensor) -> Any:
        operands = {"sum": sum_N, "scale": scale, "step": step, "codes": codes}
        parts = [Call(operands, sum_N.numel())] * 2
        return gpu_build._table(gpu_build._Plan(kernel), parts, [1, 1])

    words, num_tensors, align = table(memory)
    assert (num_tensors, align) == (2, 4)
    assert words[:2].tolist() == [0, 1]
    assert memory.data_ptr() in words.tolist()
    assert table(memory[4:])[2] == 4
    assert table(memory[1:])[2] == table(memory[:63])[2] == 1


# ---- runs ----------------------------------------------------------------------------


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plain=st.lists(st.sampled_from([0, 0, 0, 0, 1, 242]), max_size=90),
    block_bytes=st.sampled_from([13, 26, 200]),
    tile=st.sampled_from([16, 32]),
)
def test_runs_are_cut_as_the_definition_cuts_them(
    plain: list[int], block_bytes: int, tile: int
) -> None:
    plain_U = torch.tensor(plain, dtype=torch.uint8)
    known, on = zero_run, plain_U.to(DEVICE)
    want_B, want_C = known.encode(plain_U, block_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs_launch, "_TILE", tile)
        of_bytes, of_runs = (one.to(DEVICE) for one in (known.single, known.run))
        found_B, found_C = runs_launch.encode_runs(
            on, block_bytes, of_bytes, of_runs, known.of, known.most
        )
        assert torch.equal(found_B.cpu(), want_B)
        assert torch.equal(found_C.cpu(), want_C)
        back_U = torch.full_like(on, 7)
        assert read(known, found_B, found_C, back_U, block_bytes) == -1
    assert torch.equal(back_U.cpu(), plain_U)


def read(
    known: Coder, lengths_B: Tensor, coded_C: Tensor, plain_U: Tensor, block_bytes: int
) -> int:
    byte, times = (one.to(DEVICE) for one in (known.byte, known.times))
    return runs_launch.decode_runs(
        lengths_B, coded_C, plain_U, block_bytes, byte, times, known.of
    )


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    coded=st.lists(st.integers(0, 255), min_size=3, max_size=26),
    first=st.integers(0, 3),
)
def test_codes_that_are_none_are_refused_as_by_the_definition(
    coded: list[int], first: int
) -> None:
    known, coded_C = zero_run, torch.tensor(coded, dtype=torch.uint8)
    lengths_B = torch.tensor([first, len(coded) - first])
    around_U = torch.full((80,), 7, dtype=torch.uint8, device=DEVICE)
    want = known.decode(lengths_B, coded_C, torch.zeros(60, dtype=torch.uint8), 30)
    found = read(known, lengths_B.to(DEVICE), coded_C.to(DEVICE), around_U[10:70], 30)
    assert found == want
    assert (around_U[:10] == 7).all()
    assert (around_U[70:] == 7).all()
