"""Gradients for property tests: hypothesis strategies, and a fixed panel of the awkward ones.

Every run draws the same examples (``derandomize``), so a red test is red for everybody.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (0, 1, 2, 5, 7, 8, 9, 63, 64, 65, 200)
"""Empty, one element, around one byte of bits, around a block of 64."""

FINITE_KINDS = ("normal", "zeros", "equal", "ties", "spike", "tiny", "negative", "wide")
NON_FINITE_KINDS = ("one nan", "one inf", "minus inf", "both infs", "all nan", "nan among ties")
HUGE_KINDS = ("huge",)
KINDS = FINITE_KINDS + NON_FINITE_KINDS + HUGE_KINDS

LARGEST = 1e4
"""No finite gradient but a huge one has a larger element: three times this is still a float16."""


def bounded(num_examples: int) -> settings:
    """The settings of every property test here: the same few examples on every run."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def make_gradient(
    kind: str, numel: int, dtype: torch.dtype, seed: int = 0, *, strided: bool = False
) -> Tensor:
    """One flat gradient of a kind; ``strided`` makes it every second element of a longer tensor."""
    draw = torch.Generator().manual_seed(seed)
    normal_N = torch.randn(numel, generator=draw, dtype=torch.float64)
    values_N = _finite(kind, normal_N, draw) if kind in FINITE_KINDS else normal_N
    grad_N = values_N.clamp(-LARGEST, LARGEST).to(dtype)
    if kind in HUGE_KINDS:
        grad_N = (normal_N.sign() * torch.finfo(dtype).max * 0.9).to(dtype)
    elif kind in NON_FINITE_KINDS and numel:
        spot = int(torch.randint(numel, (), generator=draw))
        grad_N = _spoiled(kind, grad_N, spot)
    if not strided:
        return grad_N
    whole_M = torch.full((2 * numel,), 7.0, dtype=dtype)
    whole_M[::2] = grad_N
    return whole_M[::2]


def _finite(kind: str, normal_N: Tensor, draw: torch.Generator) -> Tensor:
    match kind:
        case "zeros":
            return torch.zeros_like(normal_N)
        case "equal":
            return torch.full_like(normal_N, -1.5)
        case "ties":
            return torch.randint(-2, 3, normal_N.shape, generator=draw).double()
        case "spike":
            spikes_N = torch.zeros_like(normal_N)
            spikes_N[len(spikes_N) // 2 :][:1] = LARGEST
            return spikes_N
        case "tiny":
            return normal_N * 1e-6
        case "negative":
            return -normal_N.abs()
        case "wide":
            return normal_N * 10.0 ** torch.randint(-6, 4, normal_N.shape, generator=draw)
        case _:
            return normal_N


def _spoiled(kind: str, grad_N: Tensor, spot: int) -> Tensor:
    """The gradient with non-finite elements, the first of them at ``spot``."""
    inf, nan = float("inf"), float("nan")
    match kind:
        case "one nan":
            grad_N[spot] = nan
        case "one inf":
            grad_N[spot] = inf
        case "minus inf":
            grad_N[spot] = -inf
        case "both infs":
            grad_N[-1], grad_N[spot] = -inf, inf
        case "all nan":
            grad_N[:] = nan
        case _:
            grad_N[:] = 1.0
            grad_N[spot] = nan
    return grad_N


def gradients(
    kinds: tuple[str, ...] = KINDS, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> st.SearchStrategy[Tensor]:
    """Flat gradients of awkward sizes, contents, dtypes and strides."""
    return st.builds(
        make_gradient,
        st.sampled_from(kinds),
        st.sampled_from(SIZES),
        st.sampled_from(dtypes),
        st.integers(0, 2**16),
        strided=st.booleans(),
    )


def panel() -> tuple[Tensor, ...]:
    """A fixed set that holds every kind, size class and dtype; float32, the usual one, oftenest."""
    made = [
        make_gradient(
            kind,
            numel,
            torch.float32 if numel == 65 else DTYPES[(i + j) % 4],
            seed=3 * numel + i,
            strided=bool((i + j) % 2),
        )
        for i, kind in enumerate(KINDS)
        for j, numel in enumerate((1, 9, 65, 200))
    ]
    return (torch.zeros(0), *made)
