"""Kernels launched as on a GPU: several tensors in one launch, and coders of runs.

Where there is no GPU, under Triton's interpreter.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.compress.dgc import dgc
from gradwire.compress.int8 import int8
from gradwire.compress.qsgd import qsgd
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.build import Built
from gradwire.dsl.gpu import launch as gpu_build
from gradwire.dsl.gpu.launch import Launcher
from gradwire.dsl.interp import Call
from gradwire.dsl.program import Program
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.dsl import runs_launch
from gradwire_lab.dsl.coders import Coder
from gradwire_lab.laws.inputs import make_gradient
from gradwire_lab.laws.tolerance import same_bits
from gradwire_lab.library.zero_run import zero_run
from tests.dsl.test_triton import DEVICE, launched

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no triton"),
    pytest.mark.usefixtures("triton_interpreted"),
]

ODD, EVEN = (1, 300, 0, 65, 1000), (300, 0, 4, 128, 1000)
"""Elements of tensors; the even ones are read in vectors."""


def encoded(codec: Program, sizes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Payloads, residuals and decoded vectors of several gradients encoded in one call."""
    specs = [TensorSpec(f"layer {i}", numel) for i, numel in enumerate(sizes)]
    grads = [make_gradient("normal", n, torch.float32, seed=n).to(device) for n in sizes]
    residuals = [make_gradient("wide", n, torch.float32, seed=5).to(device) for n in sizes]
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
    scale, step, codes = torch.ones(1), torch.ones(1), torch.zeros(64, dtype=torch.uint8)

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


# ---- runs --------------------------------------------------------------------------------------


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
    return runs_launch.decode_runs(lengths_B, coded_C, plain_U, block_bytes, byte, times, known.of)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(coded=st.lists(st.integers(0, 255), min_size=3, max_size=26), first=st.integers(0, 3))
def test_codes_that_are_none_are_refused_as_by_the_definition(coded: list[int], first: int) -> None:
    known, coded_C = zero_run, torch.tensor(coded, dtype=torch.uint8)
    lengths_B = torch.tensor([first, len(coded) - first])
    around_U = torch.full((80,), 7, dtype=torch.uint8, device=DEVICE)
    want = known.decode(lengths_B, coded_C, torch.zeros(60, dtype=torch.uint8), 30)
    found = read(known, lengths_B.to(DEVICE), coded_C.to(DEVICE), around_U[10:70], 30)
    assert found == want
    assert (around_U[:10] == 7).all()
    assert (around_U[70:] == 7).all()
