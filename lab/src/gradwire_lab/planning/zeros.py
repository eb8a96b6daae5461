"""measure_sparsity: where a model's gradients are non-zero, over several batches that
stand for ranks.

Source: ZEN (OSDI 2025), section 2.1 and section 3: the sparsity of the first few
iterations.
Differences from the paper: parameters stay as they are, so every batch of every step of
    every rank is one more gradient of the same kind, and stands for a rank: W ranks
    that run S steps measure densification up to W * S ranks. Rows are units where that
    is smaller on the wire.
"""

from __future__ import annotations

import datetime
import logging
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gradwire.cli.report.table import Row
from gradwire.compress.nonzero import nonzero
from gradwire.contract import Compressor, Layout
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import AllGather, Steps
from gradwire.errors import invalid
from gradwire.exchange.by_name import algorithm_by_name
from gradwire.kernels.sparse.entries import Entries, num_units
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation
from gradwire.measure.layers import (
    TrainingStep,
    looked_into,
    no_progress,
    today,
    untouched,
)
from gradwire.measure.links import broadcast_figures
from gradwire.planning.data.sparsity import (
    BLOCK,
    DOUBLINGS,
    Handling,
    Indices,
    SparsityProfile,
    TensorSparsity,
)
from gradwire.runtime.engine.engine import CONTROL, Engine
from gradwire.runtime.liveness.membership import join

from ..exchange.sparse_schemes import skew
from .index_sets import overlap_mean, overlap_spread, unit_sparsity

_log = logging.getLogger("gradwire")

NUM_GRADIENTS = 16
"""Batches measured where the caller names no number."""

LARGEST_DENSITY = 0.5
"""The largest density of units that counts as sparse: single elements of more would
take more bytes with their indices than all elements without.
"""

SHOWN_RANKS = (2, 8, 32, 128)
"""Numbers of ranks for which densification is shown."""

_TIMED_NUMEL = 2**20


class _Source(NamedTuple):
    """One tensor, and in which units its gradient is looked at."""

    name: str
    numel: int
    width: int
    is_rows: bool = False
    """Its gradients come as rows: ``nn.Embedding(sparse=True)``."""

    @property
    def num_units(self) -> int:
        return num_units(self.numel, self.width)


Select = Callable[[_Source, Tensor, int], Tensor]
"""Indices of the non-zero units of one gradient, by its number: int32, ascending."""


def measure_sparsity(
    model: nn.Module,
    step: TrainingStep,
    *,
    num_gradients: int | None = None,
    compressor: str | None = None,
    settings: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    advance: Callable[..., None] | None = None,
) -> SparsityProfile:
    """Measures the sparsity of gradients over several batches. The model is not
    changed.

    Dense gradients (more than half of their units non-zero) are left out. Row-sparse
    gradients are always measured by rows.

    Args:
        model: The model.
        step: A function that runs one forward and backward pass on a batch, another
            batch at each call. It does not step the optimizer.
        num_gradients: The number of batches, 2 to 128; 16 by default.
        compressor: The name of a sparsifier. The elements that it selects of each
            matrix count. None (the default): all elements that are not zero count.
        settings: Settings of the sparsifier. Default: the sparsifier's own.
        engine: Its ranks share the work, each with batches of its own. All ranks call
            this, and return rank 0's profile. None (the default): one process measures
            alone.
        advance: A function of an amount and a note, called for each batch. None (the
            default): nothing is called.

    Returns:
        The profile of sparsity.

    Raises:
        InvalidSetting: The number of gradients is not 2 to 128, or the payloads of
            ``compressor`` are not sparse.
    """
    wanted = NUM_GRADIENTS if num_gradients is None else num_gradients
    if not 2 <= wanted <= DOUBLINGS[-1]:
        accepted = f"2 to {DOUBLINGS[-1]}, each of which stands for a rank"
        raise invalid(
            "num_gradients", num_gradients, accepted, f"{NUM_GRADIENTS} is the default"
        )
    alone = getattr(model, "no_sync", nullcontext)
    model = looked_into(model)
    codec = None
    if compressor is not None:
        codec = _sparsifier(compressor, settings or {})
    ranks = _Ranks(engine)
    params = {
        name: param
        for name, param in model.named_parameters()
        if param.requires_grad and param.numel() and (codec is None or param.dim() >= 2)
    }
    num_steps = -(-wanted // ranks.world)
    with untouched(model), alone():  # what DDP has averaged is no rank's own
        sources, indices = _observe(
            model, params, step, num_steps, codec, ranks, advance
        )
    sets = ranks.gathered(indices)
    _warn_of_one_batch(sources, sets)
    made = SparsityProfile(
        source=_described(num_steps, ranks.world),
        num_gradients=num_steps * ranks.world,
        compressor=compressor,
        settings=dict(settings or {}),
        handling=measure_handling(),
        tensors=tuple(
            _figures(source, sets[place]) for place, source in enumerate(sources)
        ),
    )
    if engine is None or engine.world == 1:
        return made
    return broadcast_figures(engine, made)


def measure_group_sparsity(
    model: nn.Module, step: TrainingStep, **asked: Any
) -> SparsityProfile:
    """Measures sparsity among the ranks of torch's default group, which all call this
    alike.

    Without a group, batches stand for ranks.
    """
    engine = Engine(
        join(None),
        num_channels=1,
        timeout=datetime.timedelta(minutes=2),
        on_span=lambda span: None,
    )
    try:
        return measure_sparsity(model, step, engine=engine, **asked)
    finally:
        engine.close()


def sparsity_rows(sparsity: SparsityProfile) -> list[Row]:
    """A row a sparse tensor; beyond ``measured_ranks`` densification is
    extrapolated.
    """
    rows: list[Row] = []
    for tensor in sparsity.tensors:
        units = tensor.units
        rows.append(
            {
                "name": tensor.name,
                "unit": "elements" if units.width == 1 else f"rows of {units.width}",
                "fraction_dense": units.density,
                "fraction_overlap": overlap_mean(units),
                "fraction_overlap_spread": overlap_spread(units),
                **{
                    f"denser_among_{ranks}": units.gamma(ranks) for ranks in SHOWN_RANKS
                },
                **{f"skew_{ranks}": skew(units, ranks) for ranks in (8, 128)},
                "measured_ranks": sparsity.num_gradients,
            }
        )
    return rows


def _sparsifier(name: str, settings: Mapping[str, Any]) -> Compressor:
    made = algorithm_by_name(name, settings)
    if not isinstance(made, Compressor) or made.traits.layout is not Layout.SPARSE:
        accepted = "a compressor whose payloads are indices and values"
        raise invalid("compressor", name, accepted, "write dgc or topk")
    return made


def _observe(
    model: nn.Module,
    params: Mapping[str, Tensor],
    step: TrainingStep,
    num_steps: int,
    codec: Compressor | None,
    ranks: _Ranks,
    advance: Callable[..., None] | None,
) -> tuple[list[_Source], list[list[Indices]]]:
    """The sparse tensors, and this rank's index sets: one list a tensor, one set a
    step.
    """
    select = _nonzero_units if codec is None else _selected_by(codec)
    sources: list[_Source] = []
    indices: list[list[Indices]] = []
    for number in range(num_steps):
        for param in model.parameters():
            param.grad = None
        step()
        if number == 0:
            sources = _sources(params, ranks, counts=codec is None)
            indices = [[] for _ in sources]
        for source, sets in zip(sources, indices, strict=True):
            grad = params[source.name].grad
            drawn = number * ranks.world + ranks.rank
            take = _nonzero_units if source.is_rows else select
            taken = _none()
            if grad is not None:
                taken = take(source, grad, drawn).cpu().numpy()
            sets.append(taken)
        (advance or no_progress)(1, f"batch {number + 1} of {num_steps}")
    return sources, indices


def _none() -> Indices:
    return np.empty(0, dtype=np.int32)


def _sources(
    params: Mapping[str, Tensor], ranks: _Ranks, *, counts: bool
) -> list[_Source]:
    """Tensors that are sparse by all ranks' counts of one step, in their units."""
    widths = {}
    for name, param in params.items():
        widths[name] = 1
        if param.dim() >= 2:
            widths[name] = max(1, param[0].numel())
    flags = [int(p.grad is not None and p.grad.is_sparse) for p in params.values()]
    rows_of = dict(zip(params, ranks.totals(flags), strict=True))
    as_rows = {
        n: _Source(n, p.numel(), widths[n], True)
        for n, p in params.items()
        if rows_of[n]
    }
    if not counts:
        return [as_rows.get(n, _Source(n, p.numel(), 1)) for n, p in params.items()]
    flags = [
        count
        for name, param in params.items()
        for count in _elements_and_rows(param.grad, widths[name])
    ]
    totals = ranks.totals(flags)
    chosen = []
    for place, (name, param) in enumerate(params.items()):
        if name in as_rows:
            chosen.append(as_rows[name])
            continue
        elements, rows = totals[2 * place : 2 * place + 2]
        item_bytes = param.element_size()
        by_row = rows * (4 + widths[name] * item_bytes) <= elements * (4 + item_bytes)
        source = _Source(name, param.numel(), widths[name] if by_row else 1)
        mean = (rows if by_row else elements) / ranks.world
        if 0 < mean <= LARGEST_DENSITY * source.num_units:
            chosen.append(source)
    return chosen


def _elements_and_rows(grad: Tensor | None, width: int) -> tuple[int, int]:
    """How many elements, and how many rows of ``width``, are non-zero."""
    if grad is None:
        return 0, 0
    if grad.is_sparse:
        rows = grad.coalesce().indices().shape[1]
        return rows * width, rows
    flat = grad.reshape(-1)
    is_sent_R = flat.view(-1, width).any(1)
    return int(flat.count_nonzero()), int(is_sent_R.sum())


def _nonzero_units(source: _Source, grad: Tensor, number: int) -> Tensor:
    if grad.is_sparse:
        return grad.coalesce().indices()[0].int()
    payload, _ = nonzero(width=source.width).encode(None, grad.reshape(-1))
    return payload["indices"].clone()  # all that is kept of it


def _selected_by(codec: Compressor) -> Select:
    """A function that finds the indices a sparsifier takes of a gradient, without a
    residual.
    """

    def select(source: _Source, grad: Tensor, number: int) -> Tensor:
        variant = codec.for_world(DOUBLINGS[-1], number)
        state = variant.init(TensorSpec(source.name, source.numel, grad.dtype))
        dense = grad.to_dense() if grad.is_sparse else grad
        payload, _ = variant.encode(state, dense.reshape(-1).contiguous())
        return variant.entries(payload)[0]

    return select


class _Ranks:
    """The ranks that measure together; one where there is no engine."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine
        self.world = 1 if engine is None else engine.world
        self.rank = 0 if engine is None else engine.rank

    def _all(self, own_K: Tensor) -> Tensor:
        """Every rank's ``own_K``, which is of one length, as rows."""
        if self._engine is None or self.world == 1:
            return own_K[None]
        all_WK = torch.zeros(self.world * own_K.numel(), dtype=own_K.dtype)

        def steps() -> Steps[Tensor]:
            yield AllGather(all_WK, own_K)
            return all_WK.view(self.world, -1)

        end = self._engine.launch(0, "zeros", steps(), CONTROL)
        self._engine.wait([end])
        gathered: Tensor = end.result
        return gathered

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """Sums over ranks."""
        own = torch.tensor(numbers, dtype=torch.int64)
        totals: list[int] = self._all(own).sum(0).tolist()
        return totals

    def gathered(
        self, sets_of_tensors: Sequence[Sequence[Indices]]
    ) -> list[list[Indices]]:
        """All ranks' index sets of each tensor; every rank gets the same."""
        sets = [indices for tensor in sets_of_tensors for indices in tensor]
        if self.world == 1 or not sets:
            return [list(tensor) for tensor in sets_of_tensors]
        sizes_S = torch.tensor([len(indices) for indices in sets])
        sizes_WS = self._all(sizes_S).tolist()
        longest = max(map(sum, sizes_WS))
        own_K = np.concatenate(sets).astype(np.int32)
        flat_K = torch.zeros(max(1, longest), dtype=torch.int32)
        flat_K[: len(own_K)] = torch.from_numpy(own_K)
        all_WK = self._all(flat_K).numpy()
        gathered: list[list[Indices]] = [[] for _ in sets_of_tensors]
        num_steps = len(sets_of_tensors[0])
        for sizes, row_K in zip(sizes_WS, all_WK, strict=True):
            *cuts, total = np.cumsum(sizes)
            pieces = np.split(row_K[:total], cuts)
            for place, indices in enumerate(pieces):
                gathered[place // num_steps].append(indices)
        return gathered


def _figures(source: _Source, sets: Sequence[Indices]) -> TensorSparsity:
    units_a_block = max(1, BLOCK // source.width)
    width = units_a_block * source.width
    blocks = [np.unique(indices // units_a_block) for indices in sets]
    return TensorSparsity(
        name=source.name,
        units=unit_sparsity(sets, source.width, source.num_units),
        blocks=unit_sparsity(blocks, width, num_units(source.numel, width)),
        is_rows=source.is_rows,
    )


def measure_handling() -> Handling:
    """Seconds of looking at an element, and of moving one to its partition, on this
    machine.
    """
    spec = TensorSpec("timed", _TIMED_NUMEL)
    dense_N = torch.zeros(_TIMED_NUMEL)
    dense_N[::100] = 1.0
    codec = nonzero()
    buffer = torch.zeros(codec.format(spec).size_bytes, dtype=torch.uint8)
    scan_s = (
        _median_s(lambda: codec.encode(None, dense_N, buffer=buffer)) / _TIMED_NUMEL
    )
    count = _TIMED_NUMEL // 10
    entries = Entries(torch.arange(count, dtype=torch.int32) * 10, torch.ones(count))
    hashed = Permutation(_TIMED_NUMEL, seed=0)
    return Handling(
        scan_s=scan_s,
        entry_s=_median_s(lambda: partition(entries, _TIMED_NUMEL, 8, hashed)) / count,
    )


def _median_s(work: Callable[[], object], repeats: int = 5) -> float:
    taken_s = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - start_s)
    # the first one compiles, and touches fresh pages
    return statistics.median(taken_s[1:])


def _warn_of_one_batch(
    sources: Sequence[_Source], sets: Sequence[Sequence[Indices]]
) -> None:
    """A step that always takes the same batch shows gradients that overlap wholly."""
    alike = [all(np.array_equal(indices, sets[0]) for indices in sets) for sets in sets]
    if sources and all(alike):
        _log.warning(
            "every gradient of %s is non-zero at the same places in all "
            "batches: if step() takes "
            "the same batch at each call, let it take another one, as ranks do",
            ", ".join(source.name for source in sources[:3]),
        )


def _described(num_steps: int, world: int) -> str:
    who = f"each of {world} ranks" if world > 1 else "one process"
    return (
        f"{num_steps} batches in {who} ({platform.machine()}), {today()}, torch "
        f"{torch.__version__}; each batch stands for a rank"
    )
