"""The ladder of a pair: every tensor of a message through one collective, by a codec of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor

from ..contract import Compressor, Member, State, synchronise_alone
from ..contract.exchange import Ladder
from ..contract.spec import TensorSpec
from ..contract.tensorwise import tensor_sizes, together
from ..contract.verbs import Compute, Steps
from .pair import Pair, PairState


@dataclass(frozen=True)
class PairLadder(Ladder):
    """A pair whose codec has ``rungs``: see ``Compressor.ladder``."""

    pair: Pair
    rungs: tuple[Compressor, ...]

    @classmethod
    def of(cls, pair: Pair) -> PairLadder:
        """The rungs of a pair: where it is a contraction, those that are one too."""
        own = pair.codec
        rungs = [
            codec
            for codec in own.ladder()
            if codec.traits.contraction or not own.traits.contraction
        ]
        return cls(pair, tuple(rungs))

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(map(repr, self.rungs))

    @property
    def given(self) -> int:
        return self.rungs.index(self.pair.codec)

    def bytes_TL(self, spec: TensorSpec) -> list[list[int]]:
        specs = [TensorSpec("", size, spec.dtype) for size in tensor_sizes(spec)]
        return [[codec.typical(one).slot_bytes for codec in self.rungs] for one in specs]

    def init(self, spec: TensorSpec, world: int) -> PairState:
        sizes = tensor_sizes(spec)
        codec = together((self.pair.codec,) * len(sizes), sizes)
        for other in self.rungs:
            other.init(spec)  # compiles now what it needs, and not when it is chosen
        return PairState(sizes, self.pair.collective.init(codec, spec, world))

    def measure(self, me: Member, state: PairState, whole_N: Tensor) -> Steps[Tensor]:
        """Encodes and decodes every tensor at every rung, with states of their own."""
        tensors = torch.split(whole_N, list(state.sizes))
        found: Tensor = yield Compute(
            "encode",
            lambda: torch.stack([_lost(me.variant_of(codec), tensors) for codec in self.rungs], 1),
            len(self.rungs) * whole_N.numel(),
        )
        return found

    def synchronise(
        self,
        me: Member,
        state: PairState,
        rungs: Sequence[int],
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        if me.world == 1:
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        codecs = [self.rungs[rung] for rung in rungs]
        inner = yield from self.pair.collective.run(
            together(tuple(codecs), state.sizes), me, state.inner, grad_N, out_N, residual_N
        )
        if me.selection is not None:
            asked = sum(starmap(_asked, zip(codecs, state.sizes, strict=True)))
            me.selection = me.selection._replace(asked=asked)
        return PairState(state.sizes, inner)


def _asked(codec: Compressor, numel: int) -> float:
    return float(getattr(codec, "density", math.nan)) * numel


def _lost(codec: Compressor, tensors: Sequence[Tensor]) -> Tensor:
    """The squared norm of what one codec loses of each tensor."""
    states = [codec.init(TensorSpec("", one.numel(), one.dtype)) for one in tensors]
    payloads = [payload for payload, _ in codec.encode_many(states, tensors)]
    decoded = [torch.empty_like(one) for one in tensors]
    codec.decode_many(payloads, decoded)
    torch._foreach_sub_(decoded, list(tensors))
    return torch.stack([torch.linalg.vector_norm(d, dtype=torch.float64) for d in decoded]) ** 2
