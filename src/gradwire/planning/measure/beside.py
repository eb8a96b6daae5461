"""median_pace: the pace of a model's computations while its rank's compute lane is busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter as clock

import torch

from ...contract import Compressor
from ...contract.registry import load
from ...contract.spec import TensorSpec
from ...runtime.step.engine import Engine, figures_of_all

SIDE, NUMEL = 256, 2**18
"""The matrices that stand for the model, and the gradient that is encoded beside them; both take
about half a millisecond."""


def median_pace(engine: Engine, *, budget_s: float = 0.04, rounds: int = 5) -> float:
    """The pace of multiplications while another thread encodes, from 0 to 1: ``Cluster.beside``.

    Two threads that share a core go on at half their pace each. That counts as 0, as if one of them
    waited for the other. It is the median of all ranks, which call this alike: those that share
    cores measure what it costs them together. Each of ``2 * rounds`` turns takes ``budget_s``.
    """
    left_SS = torch.eye(SIDE, dtype=torch.float32)
    out_SS = torch.empty_like(left_SS)

    def num_done() -> int:
        figures_of_all(engine, [0.0])  # which returns on all ranks at once
        end_s, count = clock() + budget_s, 0
        while clock() < end_s:
            torch.mm(left_SS, left_SS, out=out_SS)
            count += 1
        return count

    shares = []
    for _ in range(rounds):
        alone = num_done()
        with _lane_busy():
            shares.append(num_done() / max(1, alone))
    own = min(1.0, max(0.0, 2 * median(shares) - 1))
    return median(rank for (rank,) in figures_of_all(engine, [own]))


@contextmanager
def _lane_busy() -> Iterator[None]:
    """A thread that encodes without a pause."""
    over, spec = threading.Event(), TensorSpec("measured", NUMEL)
    codec: Compressor = load("compress", "uniform")()
    grad_N = torch.linspace(-1, 1, NUMEL, dtype=torch.float32)
    buffer = torch.zeros(codec.format(spec).size_bytes, dtype=torch.uint8)

    def encode() -> None:
        state = codec.init(spec)
        while not over.is_set():
            _, state = codec.encode(state, grad_N, buffer=buffer)

    lane = threading.Thread(target=encode)
    lane.start()
    try:
        yield
    finally:
        over.set()
        lane.join()
