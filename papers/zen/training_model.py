"""The paper's models of figures 11 to 14, and the seconds of their steps by formulas.

A step is its computation, an all-reduce of what is dense, and then the sparse gradient
by a scheme: nothing overlaps. Adding up within a machine costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from gradwire.exchange.sparse_schemes import (
    Prediction,
    SchemeInputs,
    allgather_sparse_cost,
    dense_cost,
    zen_cost,
)
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.sparsity import TensorSparsity, UnitSparsity
from gradwire_bench.micro.sparse_rank import DENSE
from gradwire_bench.micro.sparse_rank import PAPER as ZEN
from gradwire_lab.exchange.sparse_schemes import omnireduce_cost, sparcml_cost

from ..frame import Ask, Row
from .captures import captured, lacking
from .parts import COMPUTING, LSTM_S
from .sparsity import profile_of, ranks_of
from .speed import GPUS, MACHINES, machines

COSTS: dict[str, Callable[[SchemeInputs], Prediction]] = {
    DENSE: dense_cost,
    "allgather_sparse": allgather_sparse_cost,
    "sparcml": sparcml_cost,
    "omnireduce": omnireduce_cost,
    ZEN: partial(zen_cost, formats="paper"),
}
COUNTS = (2, 4, 8, MACHINES)
GBIT = 1e9 / 8
BUCKET = 128 * 2**20 // 4
"""The elements of a bucket of 128 MB, in which a sparsified model's gradients travel:
section 4.
"""


@dataclass(frozen=True)
class Model:
    """A model of the paper, and the capture whose sparsity stands for its own."""

    name: str
    capture: str
    num_sparse: float
    """The elements of the embedding, or of all gradients under a sparsifier: tables 1
    and 2.
    """
    num_dense: float = 0.0
    computing_s: float | None = None
    """The seconds of a step's computation; None where the paper prints none."""
    paper: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """ZEN's speedup over schemes on 16 machines, by Gbit/s."""


NATURAL = (
    Model(
        "LSTM",
        "lstm",
        406e6,
        20e6,
        LSTM_S,
        {25: {"sparcml": 1.67, "omnireduce": 2.48, DENSE: 3.1}, 100: {"sparcml": 1.44}},
    ),
    Model(
        "DeepFM",
        "deepfm",
        214e6,
        68e6,
        paper={25: {"omnireduce": 1.44}, 100: {DENSE: 1.33, "omnireduce": 1.25}},
    ),
    Model(
        "NMT",
        "lstm",
        112e6,
        31e6,
        paper={25: {"omnireduce": 1.51}, 100: {DENSE: 1.38, "omnireduce": 1.32}},
    ),
)
SPARSIFIED = (
    Model(
        "Llama3.2-3B",
        "transformer",
        3e9,
        paper={
            25: {"omnireduce": 1.68, "sparcml": 2.19, DENSE: 2.02},
            100: {DENSE: 1.64, "omnireduce": 1.32},
        },
    ),
    Model(
        "OPT2.7B",
        "transformer",
        2.7e9,
        paper={
            25: {DENSE: 2.10, "omnireduce": 1.66},
            100: {DENSE: 1.45, "omnireduce": 1.31},
        },
    ),
    Model(
        "Gemma2-2B",
        "transformer",
        2e9,
        paper={
            25: {DENSE: 2.04, "omnireduce": 1.61},
            100: {DENSE: 1.44, "omnireduce": 1.27},
        },
    ),
)


def simulated(ask: Ask, models: Sequence[Model], gbit: int) -> list[Row]:
    """Steps of the paper's models by formulas: computation, then communication, no
    overlap.
    """
    rows = []
    tensors = {
        model.capture: _sums(ask, model)
        for model in models
        if lacking(model.capture) is None
    }
    for model in models:
        for count in COUNTS if model.capture in tensors else ():
            step_s, computing_s = step_of(model, tensors[model.capture], count, gbit)
            rows.append(step_row("simulated", model.name, count, step_s, computing_s))
    return rows


def _sums(ask: Ask, model: Model) -> TensorSparsity:
    """The sparsity of what 16 machines send, each the sum of its GPUs' gradients."""
    num_gpus = gpus_of(ask, model)
    found = captured(ask, model.capture, MACHINES * num_gpus)
    [tensor] = profile_of(machines(found, MACHINES, num_gpus), MACHINES).tensors
    return tensor


def gpus_of(ask: Ask, model: Model) -> int:
    """The gradients that a machine of the simulation adds up before it sends the
    sum.
    """
    return min(GPUS[model.capture], max(1, ranks_of(ask) // MACHINES))


def step_of(
    model: Model, tensor: TensorSparsity, count: int, gbit: int
) -> tuple[dict[str, float], float]:
    """The seconds of a step by scheme, and of its computation."""
    cluster = Cluster(num_ranks=count, rate_bytes_per_s=gbit * GBIT)
    slow = Cluster(num_ranks=MACHINES, rate_bytes_per_s=25 * GBIT)
    computing_s = model.computing_s
    if computing_s is None:
        computing_s = COMPUTING * slow.all_reduce_s(
            4 * (model.num_dense + model.num_sparse)
        )
    numel = round(
        min(model.num_sparse, BUCKET) if not model.num_dense else model.num_sparse
    )
    units = tensor.units.model_copy(update={"width": 1, "num_units": numel})
    at = SchemeInputs(
        numel=numel, units=units, blocks=_blocks(tensor, numel), cluster=cluster
    )
    fixed_s = computing_s + cluster.all_reduce_s(4 * model.num_dense)
    messages = model.num_sparse / numel
    step_s = {
        scheme: fixed_s + messages * cost(at).seconds for scheme, cost in COSTS.items()
    }
    return step_s, computing_s


def _blocks(tensor: TensorSparsity, numel: int) -> UnitSparsity:
    width = tensor.blocks.width
    return tensor.blocks.model_copy(update={"num_units": max(1, -(-numel // width))})


def unlike(ask: Ask, model: Model) -> str:
    """The assumption for which a simulation is not held against the paper; "" if there
    is none.
    """
    if model.computing_s is None:
        return (
            "the paper prints no computation of this model, on which the speedup "
            "depends"
        )
    if gpus_of(ask, model) < GPUS[model.capture]:
        return (
            f"a machine adds up {gpus_of(ask, model)} gradients here, the paper's "
            f"{GPUS[model.capture]}: measure without --quick"
        )
    return ""


def step_row(
    kind: str,
    model: str,
    num_machines: int,
    step_s: Mapping[str, float],
    computing_s: float,
) -> Row:
    """A row of any of the figures, from the seconds of a step by scheme."""
    return {
        "name": f"{kind}, {model}, {num_machines}",
        "kind": kind,
        "model": model,
        "num_machines": num_machines,
        "computing_s": computing_s,
        "fraction_computing": computing_s / step_s[DENSE],
        **{f"step_s_{scheme}": seconds for scheme, seconds in step_s.items()},
        **{
            f"speedup_{scheme}": step_s[DENSE] / seconds
            for scheme, seconds in step_s.items()
            if scheme != DENSE
        },
    }
