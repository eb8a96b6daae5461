"""Times the selection of sparsifiers against ``abs().topk`` and a copy, all in one run,
in turn.

A row is one sparsifier's encode: without a residual, or with one (``/residual``), which
then holds what was not sent. The gradient is standard normal, and the hard threshold
the one that lets the density pass. ``deft/n`` is what the busiest of n ranks does: the
norms of all layers, those of ResNet-50 cut to the length asked for, and then the
selection in its own. ``deft/norms`` is the first alone, which takes as long whatever n
is. The fraction of the copy's bandwidth counts a gradient read once, as in
``bench.kernel``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from gradwire.cli.report.table import Row
from gradwire.compress.dgc import dgc
from gradwire.compress.topk import topk
from gradwire.contract import Compressor, Member
from gradwire.contract.spec import TensorSpec
from gradwire.kernels.magnitudes import range_norms
from gradwire.planning import catalogue
from gradwire_lab.compress.deft import (
    layer_k,
    loads,
    owners,
    partition_of,
    select_layers,
    work,
)
from gradwire_lab.compress.gaussiank import gaussiank
from gradwire_lab.compress.graddrop import graddrop
from gradwire_lab.compress.hardthreshold import hardthreshold
from gradwire_lab.compress.redsync import redsync
from gradwire_lab.compress.sidco import sidco

from ..figures import threads_of_torch
from .kernel import KernelCase, TimedCall, in_turn

RANKS = (1, 2, 4, 8, 16)
_PEER = "abs_topk"


def measure(numel: int, density: float, threads: int, rounds: int = 15) -> list[Row]:
    """A row of the copy, and one for each way of selecting; ``threads`` is torch's side
    as well.
    """
    with threads_of_torch(threads):
        grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        scratch_N = torch.zeros_like(grad_N)
        peers: dict[str, TimedCall] = {
            _PEER: partial(_peer, grad_N, max(1, round(density * numel)))
        }
        cases = [
            *_codec_cases(density, grad_N, scratch_N, peers),
            *_deft_cases(density, grad_N, peers),
        ]
        rows = in_turn(cases, grad_N, scratch_N, rounds)
        return [{**row, "threads": threads} for row in rows]


def _peer(grad_N: Tensor, k: int) -> Tensor:
    return grad_N.abs().topk(k).indices


def _codecs(density: float, loudness: float) -> list[Compressor]:
    """The codecs that are timed, for normal gradients of this deviation."""
    estimating = [
        kind(density=density) for kind in (topk, dgc, graddrop, gaussiank, redsync)
    ]
    threshold = loudness * NormalDist().inv_cdf(1 - density / 2)
    fits = [
        sidco(density=density, distribution=name)
        for name in ("exponential", "gamma", "pareto")
    ]
    return [hardthreshold(threshold=threshold), *estimating, *fits]


def _codec_cases(
    density: float, grad_N: Tensor, scratch_N: Tensor, peers: dict[str, TimedCall]
) -> Iterator[KernelCase]:
    """Before each case ``scratch_N`` is a copy of the gradient; as a residual it
    doubles that.
    """
    for residual_N, loudness, read, suffix in (
        (None, 1.0, 4, ""),
        (scratch_N, 2.0, 12, "/residual"),
    ):
        for codec in _codecs(density, loudness):
            spec = TensorSpec("gradient", grad_N.numel())
            buffer = torch.zeros(codec.format(spec).size_bytes, dtype=torch.uint8)
            run = partial(
                codec.encode,
                codec.init(spec),
                grad_N,
                residual_N=residual_N,
                buffer=buffer,
            )
            sent = codec.typical(spec).size_bytes / grad_N.numel()
            yield KernelCase(_name(codec) + suffix, read + sent, run, peers)


def _name(codec: Compressor) -> str:
    fit = f"/{codec.distribution}" if isinstance(codec, sidco) else ""
    return type(codec).__name__ + fit


def layer_sizes(numel: int) -> tuple[int, ...]:
    """The sizes of ResNet-50's tensors, as far as they go; what is left over is one
    more layer.

    >>> layer_sizes(10_000)
    (9408, 64, 64, 464)
    """
    sizes: list[int] = []
    for layer in catalogue.load("resnet50").layers:
        for tensor in layer.tensors:
            sizes.append(min(tensor.numel, numel - sum(sizes)))
    return tuple(size for size in (*sizes, numel - sum(sizes)) if size)


def _deft_cases(
    density: float, grad_N: Tensor, peers: dict[str, TimedCall]
) -> Iterator[KernelCase]:
    sizes = layer_sizes(grad_N.numel())
    for world in RANKS:
        partition = partition_of(sizes, world)
        norms_L = torch.empty(len(partition.sizes), dtype=torch.float64)
        norms = partial(
            range_norms, grad_N, partition.starts_L, partition.stops_L, norms_L
        )
        norms()
        if world == RANKS[0]:
            yield KernelCase("deft/norms", 4, norms, peers)
        k_L = layer_k(
            norms_L.sqrt(), partition.sizes_L, max(1, round(density * grad_N.numel()))
        )
        layers_P = _busiest(
            owners(partition, k_L, world, 0), work(partition.sizes_L, k_L), world
        )
        share = int(partition.sizes_L[layers_P].sum()) / grad_N.numel()
        select_own = partial(
            select_layers, Member(0, world), grad_N, partition, layers_P, k_L[layers_P]
        )
        read = 4 + (4 + 8 * density) * share
        yield KernelCase(
            f"deft/{world}", read, partial(_in_turn, norms, select_own), peers
        )


def _in_turn(first: TimedCall, then: TimedCall) -> None:
    first()
    then()


def _busiest(owners_L: Tensor, costs_L: Sequence[float], world: int) -> Tensor:
    """The layers (int64, ascending) of the rank whose selection costs most."""
    # Behind the ranks come the layers that nobody selects in, at no cost.
    by_rank = loads(costs_L, owners_L.tolist(), world + 1)
    return (owners_L == by_rank.index(max(by_rank))).nonzero().flatten()
