"""A sparse scheme that is measured for: the first steps show what ranks take, then one
is chosen.

In its first steps the inner pair carries the gradient, and ranks announce how
many units they took. With how many units the mean had, that is all that the schemes'
formulas ask for. From then on the scheme that is fastest by them carries what the same
compressor selects.

Source: ZEN (OSDI 2025), section 3: "At the runtime, ZEN collects the lightweight
    sparsity profiling results of the first few iterations and intelligently determines
    the optimal scheme by comparing Equations (1) and (2)."
Differences: the formulas are those of ``sparse_schemes``, of what is really sent,
    latency included, for links of 1 Gbit. An all-gather is among the schemes too.
    Schemes whose bytes hang on skew are not: by theorem 1 none of them is the fastest.
Wire: 8 (W-1) bytes for counts in each measured step, beside the inner pair's; then
    those of the scheme.
State: noted_T, once for each tensor of the message, so that it is saved by parameter:
    the steps measured, and sums over them of the largest density of a rank and of the
    mean's (float64). It is the same on all ranks. And the inner pair's state, which
    goes on from scheme to scheme. Loaded for another number of ranks it speaks of the
    former one.
Contributed: the same as the inner pair's.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.steps.ordered_sums import num_entries, value_dtype
from gradwire.collective.steps.sizes import announce_count
from gradwire.contract import Compressor, Exchange, Layout, Member, Residual, State
from gradwire.contract.bounds import check_whole
from gradwire.contract.registry import load
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Steps
from gradwire.errors import invalid
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import ErrorFeedback, Wrapper
from gradwire.exchange.pair import Pair
from gradwire.exchange.sparse_schemes import counted, fastest_scheme, schemes
from gradwire.kernels.sparse.entries import num_units
from gradwire.planning.data.cluster import Cluster

STEPS = 5
"""Steps that are measured by default."""


class MeasuredState(NamedTuple):
    """The notes of the measured steps, for every tensor of the message, and the inner
    state.
    """

    noted_T: tuple[Tensor, ...]
    inner: State


@dataclass(frozen=True)
class MeasuredScheme(Wrapper):
    """A pair whose collective changes once; made by ``with_measured_scheme``.

    It leaves the name of a step's collective in ``Member.way``.
    """

    changes: ClassVar[bool] = True
    is_of_schemes: ClassVar[bool] = True
    decides_by: ClassVar[tuple[str, ...]] = ("noted_T",)

    inner: Pair
    num_steps: int = STEPS

    def __post_init__(self) -> None:
        check_whole("num_steps", self.num_steps, "leave it out")

    def init(self, spec: TensorSpec, world: int) -> MeasuredState:
        tensors = range(len(spec.tensor_shapes))
        noted_T = tuple(
            torch.zeros(3, dtype=torch.float64, device="cpu") for _ in tensors
        )
        return MeasuredState(noted_T, self.inner.init(spec, world))

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        # A parameter that no rank used in some step is one step behind; the message is
        # not.
        noted = max(state.noted_T, key=lambda noted: float(noted[0]))
        measures = not grad_N.is_meta and float(noted[0]) < self.num_steps
        spec = TensorSpec.of(grad_N)
        made = self.inner
        if not measures:
            made = self._chosen(noted, spec, me)
        me.way = None
        if me.world > 1:
            me.way = type(made.collective).__name__
        inner = yield from me.through(made, state.inner, grad_N, out_N, residual_N)
        if measures and me.world > 1:
            yield from self._note(me, state.noted_T, noted, grad_N)
        return MeasuredState(state.noted_T, inner)

    def _note(
        self, me: Member, noted_T: tuple[Tensor, ...], noted: Tensor, grad_N: Tensor
    ) -> Steps[None]:
        """Adds this step to what was noted: densities that all ranks know alike."""
        width = self.inner.codec.width
        taken = me.selection
        total = num_units(grad_N.numel(), width)
        units = 0
        merged = 0
        if taken is not None:
            units = num_units(taken.selected, width)
            merged = num_units(taken.arrived, width)
        counts = yield from announce_count(me, units, total)
        total = max(1, total)
        step = [1.0, max(counts) / total, merged / total]
        noted = noted + torch.tensor(step, dtype=torch.float64)
        for one in noted_T:
            one.copy_(noted)

    def _chosen(self, noted: Tensor, spec: TensorSpec, me: Member) -> Pair:
        """The pair that goes on: by what was noted, else by the codec's typical
        payload.
        """
        codec = self.inner.codec
        total = num_units(spec.numel, codec.width)
        steps, units, merged = noted.tolist()
        if steps:
            count = round(units / steps * total)
        else:
            count = num_entries(codec.typical(spec))
        growth = merged / units if units else 0.0
        name = scheme_of(
            min(count, total),
            spec.numel,
            codec.width,
            value_dtype(codec, spec),
            growth,
            me.world,
            me.cluster,
        )
        return replace(self.inner, collective=load("collective", name)())


@lru_cache(maxsize=256)
def scheme_of(
    count: int,
    numel: int,
    width: int,
    dtype: torch.dtype,
    growth: float,
    world: int,
    cluster: Cluster | None = None,
) -> str:
    """The name of the fastest scheme where each rank takes so many units of ``width``
    elements.

    ``growth`` is how many times as many the mean has; 0 where it is not known.

    >>> scheme_of(1_000, 4_000_000, 1, torch.float32, 2.0, 16)
    'sparcml'
    >>> scheme_of(40_000, 4_000_000, 1, torch.float32, 2.0, 16)
    'zen'
    """
    if world == 1 or not numel:
        return _names()[0]
    at = counted([count] * world, numel, width, dtype, growth, cluster)
    return fastest_scheme(at, schemes(by_counts=True)).scheme


def _names() -> tuple[str, ...]:
    """The names of the schemes to choose from."""
    return tuple(schemes(by_counts=True))


def with_measured_scheme(
    algorithm: Compressor | Exchange, *, num_steps: int = STEPS
) -> Exchange:
    """The algorithm with the fastest sparse scheme, which the first steps measure.

    Args:
        algorithm: A compressor of sparse payloads, or its pair with
            ``allgather_sparse``, ``zen`` or ``sparcml``. Both may have error feedback,
            which stays outermost.
        num_steps: The number of steps that measure. Default: 5.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: Any other algorithm.

    >>> from gradwire.compress.topk import topk
    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.tensor([4.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 2.0, 0.0, 1.0])]
    >>> run_local(with_measured_scheme(topk(density=0.25)), grads)[0][0]
    tensor([2., 1., 0., 0.])
    """
    made = exchange_for(algorithm)
    inner = made.inner if isinstance(made, ErrorFeedback) else made
    if (
        not isinstance(inner, Pair)
        or inner.codec.traits.layout is not Layout.SPARSE
        or type(inner.collective).__name__ not in _names()
    ):
        accepted = f"a compressor of sparse payloads, or a pair of one with {_listed()}"
        raise invalid(
            "algorithm", algorithm, accepted, "write gw.compress.topk(density=0.01)"
        )
    measured = MeasuredScheme(inner, num_steps)
    return measured if inner is made else ErrorFeedback(measured)


def _listed() -> str:
    *others, last = _names()
    return f"{', '.join(others)} or {last}"
