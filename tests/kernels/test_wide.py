"""Wide inputs: every compressor and kernel of values has its reference's bits on them
too.

Elements of a deep network's gradients differ by orders of magnitude. So they have more
exponents, scales and ties than normally distributed ones, for which code may take
another path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.contract import Compressor
from gradwire.contract.spec import working_dtype
from gradwire.kernels import cast, select
from gradwire.kernels.libraries import reference_only
from gradwire.kernels.sparse.entries import Entries, parts_of
from gradwire.kernels.sparse.merge import merge
from gradwire.kernels.sparse.scatter import scatter_entries
from gradwire_lab.compress import _exponents as exponents
from gradwire_lab.kernels import magnitudes, momentum
from gradwire_lab.laws.inputs import WIDE_KINDS, make_gradient
from gradwire_lab.laws.payloads import spec_alone
from tests.each import each
from tests.kernels.vectors import SIZES, compiled, residual_for, same_bits
from tests.laws.cases import by_first_example, name_of

__all__ = ["compiled"]
FEW_SIZES = (1, 9, 65, 1000, 4097)
"""Around a byte of bits, a group of 64 and a block of 4096 elements.

References of some compressors need seconds for longer ones. Kernels alone are tried
with all ``SIZES``.
"""


def same_values(a: Tensor, b: Tensor) -> bool:
    """The same bits, but for those of a NaN."""
    if not a.is_floating_point():
        return same_bits(a, b)
    return same_bits(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


def made_of(
    codec: Compressor, grad_N: Tensor, with_residual: bool
) -> dict[str, Tensor]:
    """All that a compressor writes for one gradient."""
    dtype, numel = working_dtype(grad_N.dtype), grad_N.numel()
    residual_N = (residual_for(grad_N, 1) * 1e-3).to(dtype) if with_residual else None
    state = codec.init(spec_alone(grad_N))
    payload, _ = codec.encode(state, grad_N, residual_N=residual_N)
    assert payload.buffer is not None
    sum_N = torch.full((numel,), 0.25, dtype=dtype)
    codec.merge(payload, sum_N, scale=0.3)
    found = {
        "payload": payload.buffer.clone(),
        "decoded gradient": codec.decode(
            payload, torch.empty(numel, dtype=grad_N.dtype)
        ),
        "sum": sum_N,
    }
    return found if residual_N is None else {**found, "residual": residual_N}


def assert_is_reference(made: Callable[[], dict[str, Tensor]], what: str) -> None:
    got = made()
    with reference_only():
        want = made()
    for name, value in got.items():
        assert same_values(value, want[name]), f"{what}: another {name}"


def digest_of(values: Tensor) -> str:
    """The bits, but for those of a NaN."""
    if values.is_floating_point():
        values = values.nan_to_num(nan=7.0)
    return sha256(values.view(torch.uint8).numpy()).hexdigest()


@each("kind", WIDE_KINDS)
@pytest.mark.parametrize("codec", by_first_example(), ids=name_of)
def test_every_compressor_is_its_reference(codec: Compressor, kind: str) -> None:
    for number, numel in enumerate(FEW_SIZES):
        dtype = (torch.float32, torch.bfloat16, torch.float32)[number % 3]
        grad_N = make_gradient(kind, numel, dtype, seed=numel)
        for with_residual in (False, True):
            assert_is_reference(
                lambda g=grad_N, w=with_residual: made_of(codec, g, w),  # type: ignore[misc]
                f"{numel} elements, {dtype}, residual {with_residual}",
            )


def casts(x_N: Tensor) -> dict[str, Tensor]:
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        half_N, after_N = torch.empty(x_N.numel(), dtype=dtype), residual_for(x_N, 1)
        cast.cast16_encode(x_N, half_N, 1 / 3, after_N)
        sum_N = torch.ones_like(x_N)
        cast.cast16_decode(half_N, sum_N, 0.3, add=True)
        found |= {
            f"{dtype}": half_N,
            f"loss of {dtype}": after_N,
            f"sum of {dtype}": sum_N,
        }
    return found


def coded_exponents(x_N: Tensor) -> dict[str, Tensor]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        own_N, numel = x_N.to(dtype), x_N.numel()
        coded = exponents.CodedExponents(
            torch.zeros(numel, dtype=torch.int16) if dtype == torch.float32 else None,
            torch.zeros(numel, dtype=torch.uint8),
            torch.zeros(-(-numel // exponents.BLOCK), dtype=torch.int32),
            torch.zeros(numel, dtype=torch.uint8),
        )
        size = exponents.encode_exponents(own_N, coded)
        coded = coded._replace(codes_C=coded.codes_C[:size].clone())
        out_N = torch.zeros_like(own_N)
        exponents.decode_exponents(coded, out_N)
        assert same_bits(out_N, own_N), f"{dtype}: not the bits that were encoded"
        found |= {
            f"sizes of {dtype}": coded.sizes_B,
            f"codes of {dtype}": coded.codes_C,
        }
    return found


def velocities(x_N: Tensor) -> dict[str, Tensor]:
    velocity_N, pending_N = residual_for(x_N, 3), residual_for(x_N, 1)
    whole_N = torch.empty_like(x_N)
    momentum.accumulate(
        x_N, velocity_N, pending_N, whole_N, momentum=0.9, nesterov=True
    )
    left_N = torch.where(whole_N.abs() > 1e-3, 0.0, whole_N)
    masked_N = velocity_N.clone()
    momentum.mask(masked_N, whole_N, left_N, least=1e-6)
    return {"u": velocity_N, "v": pending_N, "v + g": whole_N, "masked u": masked_N}


def norms(x_N: Tensor) -> dict[str, Tensor]:
    edges = [0, x_N.numel() // 100, x_N.numel() // 3, x_N.numel()]
    starts_L, stops_L = torch.tensor(edges[:-1]), torch.tensor(edges[1:])
    norms_L, after_N = torch.zeros(3, dtype=torch.float64), residual_for(x_N, 1)
    magnitudes.range_norms(x_N, starts_L, stops_L, norms_L, after_N)
    return {"norms": norms_L, "sum": after_N}


def selections(x_N: Tensor) -> dict[str, Tensor]:
    found = {}
    for every in (1, 2, 100):
        num_selected, after_N = x_N.numel() // every, residual_for(x_N, 1)
        indices_K = torch.empty(num_selected, dtype=torch.int32)
        values_K = torch.empty(num_selected)
        select.topk(x_N, indices_K, values_K, after_N)
        sum_N = torch.ones_like(x_N)
        select.scatter_add(indices_K, values_K, sum_N, 0.3)
        names = ("indices", "values", "residual", "sum")
        tensors = (indices_K, values_K, after_N, sum_N)
        found |= {f"{n} of 1 / {every}": t for n, t in zip(names, tensors, strict=True)}
    return found


def sparse_sums(x_N: Tensor) -> dict[str, Tensor]:
    ranks = []
    for every in (2, 3):
        indices_K = torch.arange(0, x_N.numel(), every, dtype=torch.int32)
        ranks.append(Entries(indices_K, x_N[indices_K.long()]))
    sums = merge(ranks, x_N.numel(), scale=1 / 3)
    found = {"places": sums.indices_K.clone(), "sums": sums.values.clone()}
    out_N = torch.ones_like(x_N)
    if x_N.numel():
        (part,) = parts_of(x_N.numel(), 1, None)
        scatter_entries(sums, part, out_N, 0.3)
    return {**found, "written": out_N}


Kernel = Callable[[Tensor], dict[str, Tensor]]
KERNELS: tuple[Kernel, ...] = (
    casts,
    coded_exponents,
    velocities,
    norms,
    selections,
    sparse_sums,
)


LABS = (coded_exponents, velocities, norms)
"""Kernels of the lab, whose tests are slow."""


def parameter_of(kernel: Kernel) -> Any:
    """All builds of a kernel are on one worker, which makes the reference once."""
    marks = [pytest.mark.xdist_group(kernel.__name__)]
    if kernel in LABS:
        marks.append(pytest.mark.slow)
    return pytest.param(kernel, marks=marks, id=kernel.__name__)


@cache
def gradient_of(kind: str, numel: int) -> Tensor:
    """A gradient that no kernel writes to."""
    return make_gradient(kind, numel, torch.float32, seed=numel)


@cache
def reference_of(kernel: Kernel, kind: str, numel: int) -> dict[str, str]:
    """Digests of what a kernel's reference writes, made once for all builds."""
    with reference_only():
        want = kernel(gradient_of(kind, numel))
    return {name: digest_of(value) for name, value in want.items()}


LONG = [numel for numel in SIZES if numel > 50_000]


def sizes_of(kernel: Kernel, kind: str, is_sample: bool) -> list[int]:
    """The sizes that a kernel meets a kind of gradient with; of the long ones the
    sample has a quarter, the next kind others.
    """
    turn = WIDE_KINDS.index(kind) + KERNELS.index(kernel)
    own = LONG[turn % len(LONG)]
    return [size for size in SIZES if (size not in LONG or size == own) is is_sample]


@pytest.mark.usefixtures("compiled")
@each("kind", WIDE_KINDS)
@pytest.mark.parametrize(
    "is_sample",
    [True, pytest.param(False, marks=[pytest.mark.slow, pytest.mark.nightly])],
    ids=["sample", "long"],
)
@pytest.mark.parametrize("kernel", [parameter_of(kernel) for kernel in KERNELS])
def test_every_kernel_is_its_reference(
    kernel: Kernel, kind: str, is_sample: bool
) -> None:
    """Every kernel meets every kind, and every size with some kinds."""
    for numel in sizes_of(kernel, kind, is_sample):
        got = kernel(gradient_of(kind, numel))
        want = reference_of(kernel, kind, numel)
        assert got.keys() == want.keys()
        for name, value in got.items():
            assert digest_of(value) == want[name], f"{numel} elements: another {name}"
