"""sharded_dgc: DGC of layers that are cut among ranks, by one threshold a layer.

Source: Wang et al., OSDI 2025, "ZEN", section 4 (DGC under tensor parallelism: sample
    on each device, gather the samples across devices, take one top-k threshold of all,
    apply it on each); the sampled threshold is that of Lin et al., ICLR 2018, "Deep
    Gradient Compression", section 3.1, as in ``dgc``.
Differences: the paper tells no sizes. Here each part is sampled as ``dgc`` samples a
    gradient (``sample_share`` of it, at least 64 / density draws with replacement, or
    all of it), so parts weigh differently: one draw stands for as many elements as its
    part has for each of its draws. The threshold misses the density by an eighth (one
    standard deviation) at most, however parts differ. What reaches it is sent, but for
    zeros. A part sends no more than ``cap`` times what it has of the k = density * all
    elements asked for; its share is told by the samples, and counted as a quarter of an
    equal one at least. So all parts together send at most 1.25 * cap * k, one alone cap
    * k. Where layers are not cut this is ``dgc`` but for the cap and the numbers drawn.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 37 to 40 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md).
Wire: among S parts, (S-1) * 4 * the largest number of draws (8 for float64 gradients);
    among ranks what ``collective`` makes of indices_K int32 ascending, values_K float32
    -> 8 * K bytes, K <= cap * k and the part's length.
State: (stream, step) of the random sample; the collective's. Contributed: the elements
sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.collective.steps.size_only import SizeOnlyCompressor
from gradwire.compress._coo import coo_format, share_of
from gradwire.compress._residual import as_working
from gradwire.contract import (
    Exchange,
    Member,
    Memory,
    Residual,
    Shards,
    State,
    Traits,
    synchronise_alone,
)
from gradwire.contract.bounds import MOST_SEED, check_share, check_whole
from gradwire.contract.collective import Collective
from gradwire.contract.payload import Format, Payload
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.contract.verbs import AllGather, Among, Steps
from gradwire.dsl.philox import below
from gradwire.errors import invalid

from ._sampled import LEAST_ABOVE
from ._threshold import Reaching, check_cap, estimating
from .randomk import NEXT_STEP, first_place

_LEAST_SHARE = 0.25
"""The least that a part's share is, as a fraction of an equal one: its sample may miss
the few large elements.
"""

_MASK = 0xFFFFFFFF


class SampleState(NamedTuple):
    """The random sample's (stream, step), int64, and what the collective keeps."""

    place_2: Tensor
    inner: State


@dataclass(frozen=True, kw_only=True)
class sharded_dgc(Exchange):
    """Averages about ``density`` of a layer's elements, the largest in all of its
    parts.

    ``attach(..., options=gw.Options(shards=mesh["tp"]))`` says which ranks hold the
    other parts.

    Args:
        density: The kept fraction k/n of the whole layer, in (0, 1]; default 0.01. A
            larger one sends more bytes, and elements wait for fewer steps.
        sample_share: The fraction of the gradient that is sampled for the threshold, in
            (0, 1]; default 0.001. A larger one meets the density more closely and takes
            longer. Small gradients have a larger sample.
        cap: The most that one part sends, as a multiple of its share of the density,
            from 1 to 1e9; default 2. It bounds the bytes of a step.
        seed: The seed of the random numbers that draw the sample, from 0 to 2**64 - 1;
            default 0.
        collective: The collective that carries the elements of one part. It takes
            sparse payloads of varying size; default ``allgather_sparse()``.

    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.tensor([1.0, 0.0, 4.0, 2.0]), torch.tensor([8.0, 2.0, 0.0, 2.0])]
    >>> run_local(sharded_dgc(density=0.25), grads)[1][0]
    tensor([4., 0., 2., 0.])
    """

    density: float = 0.01
    sample_share: float = 0.001
    cap: float = 2.0
    seed: int = 0
    collective: Collective = field(default_factory=allgather_sparse)
    traits: ClassVar[Traits] = estimating(least=0.5)

    def __post_init__(self) -> None:
        check_share("sharded_dgc density", self.density)
        check_share("sharded_dgc sample_share", self.sample_share)
        check_cap("sharded_dgc cap", self.cap)
        check_whole(
            "sharded_dgc seed", self.seed, "leave it out", least=0, most=MOST_SEED
        )
        refusal = "it is none"
        if isinstance(self.collective, Collective):
            refusal = self.collective.needs.refusal(self.traits) or ""
        if refusal:
            accepted = f"a collective for sparse payloads of varying size ({refusal})"
            raise invalid(
                "sharded_dgc collective", self.collective, accepted, "leave it out"
            )
        if self.cap != 2.0:
            stated = replace(self.traits, density_range=(0.5, float(self.cap)))
            object.__setattr__(self, "traits", stated)

    def init(self, spec: TensorSpec, world: int) -> SampleState:
        usual = self._usual(spec.numel)
        inner = self.collective.init(usual, spec, world)
        return SampleState(first_place(spec), inner)

    def synchronise(
        self,
        me: Member,
        state: SampleState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[SampleState]:
        if me.world == 1:
            me.selection = None
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        shards = me.shards or Shards(0, (grad_N.numel(),))
        draws = [self.draws(numel) for numel in shards.numels]
        slot = max(draws)
        dtype = working_dtype(grad_N.dtype)
        sample = me.scratch("sample", slot, grad_N, dtype)
        own_sample = sample[: draws[shards.place]]
        yield me.sized(
            "encode",
            lambda: self._sample(me, shards, state, grad_N, residual_N, own_sample),
            slot,
        )
        gathered = sample
        if len(draws) > 1 and slot:
            gathered = me.scratch("samples", slot * len(draws), grad_N, dtype)
            yield AllGather(gathered, sample, Among.SHARDS)
        codec = yield me.sized(
            "encode",  # its first part: samples become a threshold
            lambda: self._codec(shards, _parts(gathered, draws)),
            sum(draws),
            lambda: SizeOnlyCompressor(self._usual(grad_N.numel())),
        )
        inner = yield from self.collective.run(
            codec, me, state.inner, grad_N, out_N, residual_N
        )
        return SampleState(state.place_2 + NEXT_STEP, inner)

    def draws(self, numel: int) -> int:
        """How many elements of a part are looked at; all of them where there are no
        more.
        """
        least = math.ceil(min(LEAST_ABOVE / self.density, 2**31))
        return min(numel, max(least, math.ceil(self.sample_share * numel)))

    def _usual(self, numel: int) -> _Above:
        """The codec of a layer that is not cut, before anything of it is known."""
        limit = share_of(min(1.0, self.cap * self.density), numel)
        return _Above(density=self.density, threshold=0.0, limit=limit, quota=limit)

    def _sample(
        self,
        me: Member,
        shards: Shards,
        state: SampleState,
        grad_N: Tensor,
        residual_N: Residual,
        into_M: Tensor,
    ) -> None:
        """Fills ``into_M`` with the magnitudes of elements drawn; with all, where it
        has room.
        """
        numel = grad_N.numel()
        count = into_M.numel()
        if count == numel:
            into_M.copy_(grad_N)
            if residual_N is not None:
                into_M.add_(residual_N)
        else:
            stream, step = state.place_2.tolist()
            # each rank draws for itself
            stream += me.rank * len(shards.numels) + shards.place
            bound_1 = torch.tensor([numel], device="cpu")
            order_M = torch.arange(count, device="cpu")
            places_M = below(bound_1, order_M, self.seed, step, stream & _MASK).to(
                grad_N.device
            )
            into_M.copy_(grad_N.index_select(0, places_M))
            if residual_N is not None:
                into_M.add_(residual_N.index_select(0, places_M))
        # What is not finite is sent before all else.
        torch.nan_to_num_(into_M.abs_(), nan=math.inf, posinf=math.inf)

    def _codec(self, shards: Shards, samples: list[Tensor]) -> _Above:
        """A codec of one threshold for all parts, which as many elements reach as are
        asked for.
        """
        total = sum(shards.numels)
        numel = shards.numels[shards.place]
        asked = share_of(self.density, total)
        weights = []
        for of_part, sample in zip(shards.numels, samples, strict=True):
            weights.append(of_part / max(1, sample.numel()))
        least = _LEAST_SHARE / len(samples)
        threshold = 0.0  # the least of a sample is not the least of all
        if self.density < 1:
            threshold = _weighted_edge(samples, weights, asked)
        reach = []
        for weight, sample in zip(weights, samples, strict=True):
            reaches = (sample >= threshold) & (sample > 0)
            reach.append(weight * int(reaches.sum()))
        if len(samples) == 1:
            share = 1.0
        elif sum(reach):
            share = max(reach[shards.place] / sum(reach), least)
        else:
            share = max(numel / max(1, total), least)
        most = min(total, round(self.cap * self.density * total))
        limit = min(numel, max(1, most))
        own = round(share * self.cap * self.density * total)
        quota = min(limit, max(1, own))
        return _Above(
            density=self.density, threshold=threshold, limit=limit, quota=quota
        )


def _parts(gathered: Tensor, draws: list[int]) -> list[Tensor]:
    """Every part's sample; behind a shorter one a slot holds nothing of meaning."""
    if not gathered.numel():
        return [gathered for _ in draws]
    slots = gathered.chunk(len(draws))
    return [slot[:count] for slot, count in zip(slots, draws, strict=True)]


def _weighted_edge(samples: list[Tensor], weights: list[float], asked: int) -> float:
    """The magnitude that ``asked`` elements reach, of which each sampled one stands for
    several.
    """
    largest = []
    each = []
    for sample, weight in zip(samples, weights, strict=True):
        if sample.numel():  # of one part no more can matter than are asked for of all
            count = min(sample.numel(), math.ceil(asked / weight))
            largest.append(sample.topk(count).values)
            weights_K = sample.new_full((count,), weight, dtype=torch.float64)
            each.append(weights_K)
    if not largest:
        return 0.0
    values, order = torch.cat(largest).sort(descending=True)
    in_order = torch.cat(each).index_select(0, order)
    reached = in_order.cumsum(0)
    # Sums of weights that are no whole numbers may end a little below what they come
    # to.
    place = int(torch.searchsorted(reached, asked * (1 - 1e-9)))
    last = values.numel() - 1
    return float(values[min(place, last)])


@dataclass(frozen=True, kw_only=True)
class _Above(Reaching):
    """Sends what reaches a threshold that ranks agreed on.

    ``limit`` is the most that any rank may send of this part, as all that hold it know;
    ``quota`` the most that this rank sends in this step.
    """

    density: float
    threshold: float
    limit: int
    quota: int
    traits: ClassVar[Traits] = estimating(least=0.5)

    def most(self, numel: int) -> int:
        return min(self.limit, numel)

    def typical(self, spec: TensorSpec) -> Format:
        return coo_format(share_of(self.density, spec.numel))

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        of_this_step = replace(self, limit=self.quota)
        whole_N = as_working(grad_N)
        return of_this_step.listed(whole_N, self.threshold, residual_N, buffer), state


EXAMPLES = (sharded_dgc(), sharded_dgc(density=0.3, cap=1.5))
