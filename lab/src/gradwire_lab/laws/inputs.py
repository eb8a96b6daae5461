"""Inputs that laws are tried with: awkward gradients, and models with clusters, the
small first.

Everything is drawn from seeds, so that what broke a law can be made again:
``Drawn(kind="normal", numel=9, seed=27).grad()``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    # needs pydantic, which gradients do without
    from gradwire.planning.data.cluster import Cluster
    from gradwire.planning.data.profile import GradientDType, Profile

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE_KINDS = (
    "log-uniform",
    "lognormal",
    "five scales",
    "few values",
    "denormals",
    "outlier",
)
"""Gradients as deep networks have them, whose elements differ by orders of magnitude.

Normally distributed elements have about eight exponents in a block. Code for more of
them is never reached with these alone.
"""
FINITE_KINDS = (
    *(
        "normal",
        "zeros",
        "equal",
        "ties",
        "spike",
        "tiny",
        "minute",
        "negative",
        "wide",
    ),
    *WIDE_KINDS,
)
NON_FINITE_KINDS = (
    "one nan",
    "one inf",
    "minus inf",
    "both infs",
    "all nan",
    "nan among ties",
)
HUGE_KINDS = ("huge",)
KINDS = FINITE_KINDS + NON_FINITE_KINDS + HUGE_KINDS
SIZES = (1, 9, 65, 200)
"""One element, around one byte of bits, around a group of 64; beside these no element
at all.
"""

LARGEST = 1e4
"""No finite gradient but a huge one has a larger element: three times this is still a
float16.
"""
LONGEST_BLOCK = 20_000


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """How one flat gradient is made; ``strided`` is every second element of a longer
    tensor.
    """

    kind: str
    numel: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    strided: bool = False

    def grad(self) -> Tensor:
        """The gradient, anew in each call."""
        return make_gradient(
            self.kind, self.numel, self.dtype, self.seed, strided=self.strided
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        strided = ", every second element of a longer tensor" if self.strided else ""
        return f"{self.kind}, {self.numel} elements, {dtype}, seed {self.seed}{strided}"


def make_gradient(
    kind: str, numel: int, dtype: torch.dtype, seed: int = 0, *, strided: bool = False
) -> Tensor:
    """One flat gradient of a kind."""
    draw = torch.Generator().manual_seed(seed)
    normal_N = torch.randn(numel, generator=draw, dtype=torch.float64)
    values_N = normal_N
    if kind in FINITE_KINDS:
        values_N = _finite(kind, normal_N, draw)
    if kind == "denormals":
        values_N = values_N * torch.finfo(dtype).tiny
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
        case "minute":
            return normal_N * 1e-30
        case "negative":
            return -normal_N.abs()
        case "wide":
            return normal_N * 10.0 ** torch.randint(
                -6, 4, normal_N.shape, generator=draw
            )
        case kind if kind in WIDE_KINDS:
            return _wide(kind, normal_N, draw)
        case _:
            return normal_N


def _wide(kind: str, normal_N: Tensor, draw: torch.Generator) -> Tensor:
    """Elements of one of ``WIDE_KINDS``; "denormals" is a factor on the smallest normal
    number.
    """
    uniform_N = torch.rand(normal_N.shape, generator=draw, dtype=torch.float64)
    match kind:
        case "log-uniform":  # over 20 octaves
            return normal_N.sign() * 2.0 ** (20 * uniform_N - 16)
        case "lognormal":
            return normal_N * torch.randn(normal_N.shape, generator=draw).double().exp()
        case "five scales":
            return normal_N * 2.0 ** (4 * (5 * uniform_N).floor() - 16)
        case "few values":
            return torch.tensor([0.0, 1e-3, -1e-3, 0.5, -3.0]).double()[
                (5 * uniform_N).long()
            ]
        case "outlier":
            outlier_N = normal_N * 1e-4
            outlier_N[len(outlier_N) // 3 :][:1] = LARGEST / 2
            return outlier_N
        case _:
            return normal_N * 2.0 ** (-4 - 16 * uniform_N)


def _spoiled(kind: str, grad_N: Tensor, spot: int) -> Tensor:
    """The gradient with non-finite elements, the first of them at ``spot``."""
    inf = float("inf")
    nan = float("nan")
    match kind:
        case "one nan":
            grad_N[spot] = nan
        case "one inf":
            grad_N[spot] = inf
        case "minus inf":
            grad_N[spot] = -inf
        case "both infs":
            grad_N[-1] = -inf
            grad_N[spot] = inf
        case "all nan":
            grad_N[:] = nan
        case _:
            grad_N[:] = 1.0
            grad_N[spot] = nan
    return grad_N


def panel(block: int | None = None) -> tuple[Drawn, ...]:
    """Every kind in every size class and dtype, the shortest first; float32 oftenest.

    With ``block``, the elements that share what a reduction gives, there are gradients
    of a block and one element too.

    >>> print(*panel()[:2], sep="; ")
    normal, 0 elements, float32, seed 0; normal, 1 elements, float32, seed 3
    """
    made = [
        Drawn(
            kind=kind,
            numel=numel,
            dtype=torch.float32 if numel == 65 else DTYPES[(i + j) % 4],
            seed=3 * numel + i,
            strided=bool((i + j) % 2),
        )
        for j, numel in enumerate(SIZES)
        for i, kind in enumerate(KINDS)
    ]
    if block is not None:
        longer = min(block, LONGEST_BLOCK) + 1
        made += [
            Drawn(kind=kind, numel=longer) for kind in ("normal", "wide", "one nan")
        ]
    return (Drawn(kind="normal", numel=0), *sorted(made, key=lambda one: one.numel))


# ---- models and clusters -------------------------------------------------------------

LayerRow = tuple[Sequence[int], float, float]
"""Elements of each tensor of a layer, its forward and its backward seconds."""

MIXED: tuple[GradientDType, ...] = ("float32", "bfloat16")
NUM_MODELS = 24


def profile_of(
    *rows: LayerRow,
    model: str = "drawn",
    dtypes: Sequence[GradientDType] = ("float32",),
) -> Profile:
    """One layer a row; tensors take ``dtypes`` in turn."""
    from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor

    layers = []
    count = 0
    for place, (numels, forward_s, backward_s) in enumerate(rows):
        tensors = []
        for numel in numels:
            dtype = dtypes[count % len(dtypes)]
            tensors.append(
                ProfiledTensor(name=f"t{count}", shape=(numel,), dtype=dtype)
            )
            count += 1
        layers.append(
            Layer(
                name=f"layer{place}",
                tensors=tuple(tensors),
                forward_s=forward_s,
                backward_s=backward_s,
            )
        )
    return Profile(
        model=model, source="made up for laws", batch_size=1, layers=tuple(layers)
    )


@dataclass(frozen=True)
class Facts:
    """The inputs of a planner: the rows of a profile, the dtypes of its tensors, and a
    cluster.
    """

    rows: tuple[LayerRow, ...]
    dtypes: tuple[GradientDType, ...]
    cluster: Cluster

    @property
    def num_elements(self) -> int:
        """Elements of all gradients."""
        return sum(sum(numels) for numels, _, _ in self.rows)

    def profile(self) -> Profile:
        """The profile, anew in each call."""
        return profile_of(*self.rows, dtypes=self.dtypes)

    def __str__(self) -> str:
        sizes = ", ".join(str(list(numels)) for numels, _, _ in self.rows)
        ranks = self.cluster.num_ranks
        rate = self.cluster.rate_bytes_per_s
        return (
            f"layers of {sizes} elements, {'/'.join(self.dtypes)}, {ranks} ranks, "
            f"{rate:.3g} B/s"
        )


def facts() -> tuple[Facts, ...]:
    """Models of up to seven layers on clusters of up to 64 ranks, those of few elements
    first.

    Some layers have no gradients, some take no time, some tensors are empty.
    """
    from gradwire.planning.data.cluster import Cluster
    from gradwire.planning.data.fit import LineFit

    draw = random.Random(0)
    made = []
    for number in range(NUM_MODELS):
        rows = tuple(
            (
                tuple(
                    draw.choice((0, 1, 9, 300, 3000)) for _ in range(draw.randrange(4))
                ),
                draw.choice((0.0, 10 ** draw.uniform(-6, -2))),
                draw.choice((0.0, 10 ** draw.uniform(-6, -2))),
            )
            for _ in range(1 + number % 7)
        )
        measured = LineFit(alpha_s=1e-4, per_unit_s=1e-6)
        cluster = Cluster(
            num_ranks=draw.choice((1, 2, 3, 8, 64)),
            rate_bytes_per_s=10 ** draw.uniform(4, 8),
            hop_s=draw.choice((0.0, 10 ** draw.uniform(-6, -3))),
            collectives={"all_reduce": measured} if number % 3 == 2 else {},
        )
        made.append(Facts(rows, (MIXED, MIXED[:1], MIXED[1:])[number % 3], cluster))
    return tuple(sorted(made, key=lambda one: one.num_elements))
