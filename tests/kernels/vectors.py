"""Vectors that kernels find hard, and the builds they are tried with."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from gradwire.kernels import compiler
from gradwire.kernels import libraries as build
from gradwire_lab.laws.inputs import WIDE_KINDS, make_gradient

SIZES = (
    0,
    1,
    2,
    7,
    8,
    9,
    31,
    32,
    33,
    4095,
    4097,
    16383,
    16385,
    65535,
    65536,
    65537,
    200_003,
)
KINDS = (
    "normal",
    "zeros",
    "negative zeros",
    "ties",
    "all equal",
    "mostly zeros",
    "subnormal",
    "huge",
    "not finite",
    "all not finite",
    "one loud layer",
    "ascending",
    *WIDE_KINDS,
)

cases = st.tuples(st.sampled_from(SIZES), st.sampled_from(KINDS), st.integers(0, 2**16))


def vector(numel: int, kind: str, seed: int) -> torch.Tensor:
    """A float32 vector that is the same for the same arguments."""
    if kind in WIDE_KINDS:
        return make_gradient(kind, numel, torch.float32, seed)
    random = torch.Generator().manual_seed(seed)
    x_N = torch.randn(numel, generator=random)
    chance_N = torch.rand(numel, generator=random)
    if kind == "zeros":
        x_N = torch.zeros(numel)
    elif kind == "negative zeros":
        x_N = torch.where(chance_N < 0.5, -0.0, x_N)
    elif kind == "ties":
        x_N = x_N.round()
    elif kind == "all equal":
        x_N = torch.full((numel,), -1.5)
    elif kind == "mostly zeros":
        x_N = torch.where(chance_N < 0.995, 0.0, x_N)
    elif kind == "subnormal":
        x_N = x_N * 1e-40
    elif kind == "huge":
        x_N = x_N.sign() * 3e38
    elif kind == "not finite":
        x_N[chance_N < 0.02] = torch.inf
        x_N[chance_N < 0.015] = -torch.inf
        x_N[chance_N < 0.01] = torch.nan
    elif kind == "all not finite":
        x_N = torch.where(chance_N < 0.5, torch.nan, -torch.inf)
    elif kind == "one loud layer":
        x_N[: numel // 50] *= 1e4
    elif kind == "ascending":
        x_N = torch.arange(numel, dtype=torch.float32)
    return x_N


def residual_for(x_N: torch.Tensor, seed: int) -> torch.Tensor:
    """A finite residual of a tenth of a gradient's size; zero where ties or zeros must
    stay.
    """
    random = torch.Generator().manual_seed(seed + 1)
    noise_N = torch.randn(x_N.numel(), generator=random) * 0.1
    return noise_N if seed % 2 else torch.zeros_like(x_N)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


VARIANTS = {  # this machine's own instructions; AVX2; no extension at all
    "native": ("-march=native", "-fopenmp"),
    "x86-64-v3": ("-march=x86-64-v3", "-fopenmp"),
    "portable": ("-fopenmp",),
}


def runs_here(variant: str) -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    has_avx2 = platform.machine() == "x86_64" and {
        "avx2",
        "f16c",
        "fma",
        "bmi2",
    } <= set(flags)
    return variant != "x86-64-v3" or has_avx2


@contextlib.contextmanager
def built_as(variant: str) -> Iterator[None]:
    """Within the block kernels are those of one of ``VARIANTS``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_loaded", {})
        patch.setattr(
            compiler, "FLAG_SETS", ((*compiler.BASE_FLAGS, *VARIANTS[variant]),)
        )
        if build.backend() != "cpp":
            pytest.skip("no C++ compiler here; the reference is tested by itself")
        yield


@pytest.fixture(scope="module", params=VARIANTS)
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    if not runs_here(request.param):
        pytest.skip("this machine has no AVX2")
    with built_as(request.param):
        yield
