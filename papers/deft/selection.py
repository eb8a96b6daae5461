"""Seconds of selections by their passes, on one thread: what figure 9 and table 1 of
DEFT compare.

Ranks run one after another in one process, each on the same gradient, which none
writes, and with the same buffer for the mean. So they do not get in each other's way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.contract import Compressor, Exchange, Member
from gradwire.exchange.local import drive
from gradwire_bench.workloads.train import message_of
from gradwire_lab.compress.cltk import cltk
from gradwire_lab.compress.deft import deft

from ..workloads.clocked import Spent, clocked

CLOCK = time.thread_time
"""A clock that counts only the one thread that does all the work."""


@dataclass(frozen=True)
class Selected:
    """The gradient to select from, its layers' sizes and the density asked for."""

    grad_N: Tensor
    layers: Sequence[int]
    density: float


def encode_s(codec: Compressor, given: Selected, repeats: int) -> float:
    """The least seconds of ``repeats`` encodes, as other work of the machine only
    adds.
    """
    found = []
    for _ in range(repeats + 1):
        start_s = CLOCK()
        codec.encode(None, given.grad_N)
        found.append(CLOCK() - start_s)
    return min(found)


class Parts(NamedTuple):
    """The seconds of DEFT's selection, by its passes; each is the least of several
    times.
    """

    norms_s: float
    """The pass over all elements that takes the norms of all layers."""
    take_s: float
    """The gathering of the values at the elements that any rank selected."""
    layers_s: float
    """The selection in the layers of the rank that has most to do."""
    mean_layers_s: float
    """The selection in the layers of a rank, a mean over ranks."""
    partition_s: float
    """The work that is done once for each layer, on the rank that has most of it."""

    @property
    def all_s(self) -> float:
        """The seconds of the rank with most to do, without the work for each layer."""
        return self.norms_s + self.take_s + self.layers_s


def deft_parts(
    given: Selected, world: int, repeats: int, allocation: str = "level"
) -> Parts:
    """The seconds of each of DEFT's passes, by one of ``deft``'s allocations.

    Gradients are the same on all ranks, so the bins of layers are the same in every
    step, and each goes to the next rank.
    """
    exchange = deft(density=given.density, layers=given.layers, allocation=allocation)
    numel = given.grad_N.numel()
    norms_s = inf
    take_s = inf
    partition_s = inf
    bins_s = [inf] * world
    for step, spent in enumerate(_steps(exchange, given, world, repeats)):
        for rank, own in enumerate(spent):
            bin_ = (rank + step) % world
            bins_s[bin_] = min(bins_s[bin_], *own["encode", numel // world])
            norms, take = own["encode", numel]
            norms_s = min(norms_s, norms)
            take_s = min(take_s, take)
        partition_s = min(partition_s, max(map(_of_layers, spent)))
    return Parts(norms_s, take_s, max(bins_s), sum(bins_s) / world, partition_s)


def _of_layers(own: Spent) -> float:
    """The seconds of the encodes over fewest elements, which are as many as there are
    layers.
    """
    sizes = [numel for name, numel in own if name == "encode"]
    return sum(own["encode", min(sizes)])


def cltk_s(given: Selected, world: int, repeats: int) -> tuple[float, float]:
    """The least seconds of the leader's selection, and of what any other rank does
    meanwhile.
    """
    leads_s = inf
    idles_s = inf
    exchange = cltk(density=given.density)
    for step, spent in enumerate(_steps(exchange, given, world, repeats)):
        for rank, own in enumerate(spent):
            _, selection, _ = own["encode", given.grad_N.numel()]
            if rank == step % world:
                leads_s = min(leads_s, selection)
            else:
                idles_s = min(idles_s, selection)
    return leads_s, idles_s


def _steps(
    exchange: Exchange, given: Selected, world: int, repeats: int
) -> Iterator[list[Spent]]:
    """The seconds that each rank spends in each of ``repeats`` steps."""
    grad_N = given.grad_N
    mean_N = torch.empty_like(given.grad_N)
    members = [Member(rank, world) for rank in range(world)]
    spec = message_of([grad_N])
    states = [exchange.init(spec, world) for _ in members]
    for step in range(repeats):
        spent: list[Spent] = [{} for _ in members]
        all_steps = [
            clocked(exchange.synchronise(member, state, grad_N, mean_N), own, CLOCK)
            for member, state, own in zip(members, states, spent, strict=True)
        ]
        states = drive(all_steps, seed=step).results
        yield spent
