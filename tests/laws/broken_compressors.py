"""Deliberately wrong compressors; each is wrong in the one thing its docstring
names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.compress.cast16 import cast16
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.compress.uniform import uniform
from gradwire.contract import Compressor, State, Traits
from gradwire.contract.payload import Field, Format, Payload
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.language import (
    Compressed,
    Vector,
    concat,
    floor,
    greater,
    map,
    random,
    reduce,
    smaller,
    uint2,
    uint4,
    where,
)
from gradwire_lab.compress.natural_compression import natural_compression
from gradwire_lab.compress.qsgd import qsgd
from gradwire_lab.compress.terngrad import terngrad

Encoded = tuple[Payload, State]


@dataclass(frozen=True, kw_only=True)
class wraps(Compressor):
    """A sound compressor, whose methods the specimens change."""

    sound: ClassVar[Compressor] = onebit()
    traits: ClassVar[Traits] = onebit.traits

    def format(self, spec: TensorSpec) -> Format:
        return self.sound.format(spec)

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        return self.sound.encode(state, grad_N, **to)

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.sound.decode(payload, out_N, scale=scale)


class swapped_means(wraps):
    """Decodes negatives to the mean of the positives, and the other way round."""

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        flipped = Payload(payload.format, payload.buffer.clone())
        flipped["low"].copy_(payload["high"])
        flipped["high"].copy_(payload["low"])
        return super().decode(flipped, out_N, scale=scale)


class loses_first_element(topk):
    """Takes index 0 for an empty entry: it leaves the residual but is never decoded."""

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        super().decode(payload, out_N, scale=scale)
        out_N[:1] = 0
        return out_N


class drops_ties(topk):
    """Sends only what exceeds the k-th magnitude; what equals it leaves the residual
    too.
    """

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        payload, state = super().encode(state, grad_N, **to)
        values_K = payload["values"]
        if values_K.numel() > 1:
            values_K[values_K.abs() == values_K.abs().min()] = 0
        return payload, state


class understates(wraps):
    """Its format leaves out the means."""

    def format(self, spec: TensorSpec) -> Format:
        return Format((Field("bits", torch.uint8, -(-spec.numel // 8)),))


class returns_another_tensor(none):
    """decode leaves ``out_N`` alone and returns a float32 tensor of its own."""

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        return payload["values"].float() * scale


class depends_on_the_call(cast16):
    """Every second call rounds the other way."""

    calls: ClassVar[Iterable[int]] = itertools.count()

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        payload, state = super().encode(state, grad_N, **to)
        payload["values"].mul_(1 + 0.01 * (next(self.calls) % 2))
        return payload, state


class ignores_buffer(wraps):
    """Makes its own buffer whatever it is given."""

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        return super().encode(state, grad_N, **{**to, "buffer": None})


class relies_on_zeros(wraps):
    """Sets bits in the buffer and never clears one."""

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        buffer = to.pop("buffer", None)
        payload, state = super().encode(state, grad_N, **to)
        if buffer is not None:
            payload = Payload(payload.format, buffer.bitwise_or_(payload.buffer))
        return payload, state


class forgets_residuals_of_many(wraps):
    """Encodes gradients together without their residuals."""

    def encode_many(
        self, states: Any, grads: Any, residuals: Any = None, buffers: Any = None
    ) -> Any:
        return super().encode_many(states, grads, None, buffers)


class scales_many_alike(wraps):
    """Gradients that are encoded together are shrunk to the mean magnitude of all."""

    def encode_many(
        self, states: Any, grads: Any, residuals: Any = None, buffers: Any = None
    ) -> Any:
        size = torch.cat(list(grads)).abs().mean()
        return super().encode_many(
            states, [g.clamp(-size, size) for g in grads], residuals, buffers
        )


class keeps_states_of_many(qsgd):
    """Draws the same numbers again for gradients that are encoded together."""

    def encode_many(self, states: Any, *given: Any, **named: Any) -> Any:
        found = super().encode_many(states, *given, **named)
        return [
            (payload, state) for (payload, _), state in zip(found, states, strict=True)
        ]


class decodes_many_unscaled(wraps):
    """Takes no account of the scale where several payloads are decoded in one call."""

    def decode_many(self, payloads: Any, outs: Any, *, scale: float = 1.0) -> None:
        super().decode_many(payloads, outs)


class merges_many_into_zeros(wraps):
    """Forgets what sums held where several payloads are merged in one call."""

    def merge_many(self, payloads: Any, sums: Any, *, scale: float = 1.0) -> None:
        super().decode_many(payloads, sums, scale=scale)


class writes_its_input(cast16):
    """Scales the gradient in place."""

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        return super().encode(state, grad_N.mul_(0.5), **to)


class decodes_in_place(cast16):
    """Scales the payload itself."""

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        payload["values"].mul_(scale)
        return super().decode(payload, out_N)


class doubles_residual(wraps):
    """Counts what was left twice."""

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        if to.get("residual_N") is not None:
            to["residual_N"].mul_(2)
        return super().encode(state, grad_N, **to)


class delays_residual(wraps):
    """Adds new loss to the residual but never sends it."""

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        residual_N = to.pop("residual_N", None)
        payload, state = super().encode(state, grad_N, **to)
        if residual_N is not None:
            lost_N = grad_N - self.decode(payload, torch.empty_like(residual_N))
            residual_N.add_(lost_N.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        return payload, state


class absorbs_nan(cast16):
    """Keeps inf - inf in the residual."""

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        residual_N = to.pop("residual_N", None)
        whole_N = grad_N if residual_N is None else residual_N.add_(grad_N).clone()
        form = self.format(TensorSpec("", grad_N.numel(), grad_N.dtype))
        payload = Payload.empty(form, to.get("buffer"))
        payload["values"].copy_(whole_N * self.prescale)
        if residual_N is not None:
            residual_N.sub_(self.decode(payload, torch.empty_like(residual_N)))
        return payload, state


class hides_nan(topk):
    """Ranks NaN and inf below everything, so that GradScaler never sees them."""

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        return super().encode(
            state, grad_N.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), **to
        )


class hides_nan_with_residual(none):
    """Cleans the sum of gradient and residual before it is sent instead of after."""

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        if to.get("residual_N") is not None:
            grad_N = grad_N.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return super().encode(state, grad_N, **to)


class claims_lossless(cast16):
    """Rounds to 16 bits, and says it does not."""

    traits: ClassVar[Traits] = replace(cast16.traits, lossless=True)


class amplifies(topk):
    """Makes up for what it drops by sending three times what it keeps."""

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        super().merge(payload, sum_N, scale=3 * scale)


class stretches_sums(onebit):
    """Multiplies by its stretch at every rank that a partial sum passes."""

    def for_sums(self) -> onebit:
        return self


class rounds_down(uniform):
    """Takes the level below whatever it draws."""

    def encode(self, gradient: Vector) -> Compressed:
        low, high = reduce(gradient, smaller), reduce(gradient, greater)
        gap = (high - low) / 3
        codes = map(gradient, lambda x: uint2(floor((x - low) / gap + 0 * random())))
        return concat(low=low, gap=gap, codes=codes)

    def decode(self, compressed: Compressed) -> Vector:
        return uniform.source.decode(self, compressed)


class loses_tiny_blocks(uniform):
    """Sends the smallest element alone of a block whose gap has no finite inverse."""

    def encode(self, gradient: Vector) -> Compressed:
        low, high = reduce(gradient, smaller), reduce(gradient, greater)
        gap = (high - low) / 15
        per_gap = where(gap > 3e-39, 1 / gap, 0.0)
        codes = map(gradient, lambda x: uint4(floor((x - low) * per_gap + random())))
        return concat(low=low, gap=gap, codes=codes)

    def decode(self, compressed: Compressed) -> Vector:
        return uniform.source.decode(self, compressed)


class hides_its_range(natural_compression, unbiased_from=0.0):
    """Loses elements below the least power, and says that it is unbiased there."""


class draws_once(qsgd):
    """Keeps no step, so that all of them draw the same numbers."""

    def init(self, spec: TensorSpec) -> State:
        return None


class hides_its_clipping(terngrad):
    """Cuts large elements off, and says that it is unbiased."""

    def stated(self) -> Traits:
        return type(self).traits


class merges_all_but_one(wraps):
    """Leaves the last of several payloads out."""

    def merge_all(self, payloads: Any, sum_N: Tensor, *, scale: float = 1.0) -> None:
        super().merge_all(payloads[:-1], sum_N, scale=scale)


class merges_unscaled(wraps):
    """merge forgets its scale."""

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        super().merge(payload, sum_N)


class decodes_unscaled(wraps):
    """decode forgets its scale."""

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().decode(payload, out_N)


class adds_on_decode(topk):
    """decode does not clear ``out_N`` first."""

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        self.merge(payload, out_N, scale=scale)
        return out_N


class square_roots(none):
    """Sends square roots, which cannot be summed, and says they can."""

    traits: ClassVar[Traits] = Traits(layout=none.traits.layout, additive=True)

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        return super().encode(state, grad_N.sign() * grad_N.abs().sqrt(), **to)

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        super().decode(payload, out_N)
        return out_N.copy_(out_N * out_N.abs() * scale)

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        Compressor.merge(self, payload, sum_N, scale=scale)


class never_prescales(cast16):
    """Sends gradients undivided, so that their sum leaves float16's range."""

    def for_world(self, world: int, rank: int = 0) -> cast16:
        return self


class calls_sums_decoded(none):
    """Sends gradients undivided, and says that their sum in its place is the mean."""

    def for_world(self, world: int, rank: int = 0) -> none:
        return self

    def is_decoded(self, *, scale: float) -> bool:
        return True


class draws_alike(qsgd):
    """Draws the same numbers on every rank."""

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        return self


@dataclass(frozen=True, kw_only=True)
class decodes_by_rank(none):
    """Decodes to something else on every rank."""

    rank: int = 0

    def for_world(self, world: int, rank: int = 0) -> none:
        return replace(self, rank=rank)

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().decode(payload, out_N, scale=scale * (1 + self.rank))


@dataclass(eq=True, unsafe_hash=True)
class thawed(Compressor):
    """Its settings can be changed, and given by position."""

    factor: float = 1.0
    traits: ClassVar[Traits] = none.traits

    def format(self, spec: TensorSpec) -> Format:
        return none().format(spec)

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        return none().encode(state, grad_N, **to)

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        return none().decode(payload, out_N, scale=scale)


class claims_nonexpansive(qsgd):
    """Promises to lose no more than it was given, and loses more with few levels."""

    def stated(self) -> Traits:
        return replace(super().stated(), nonexpansive=True)


class starves(topk):
    """Never sends the second half of a gradient, which is no expansion of any
    vector.
    """

    def encode(self, state, grad_N, *, residual_N=None, buffer=None):
        half, sent_N = grad_N.numel() // 2, grad_N.clone()
        sent_N[half:] = 0
        if residual_N is None:
            return super().encode(state, sent_N, buffer=buffer)
        kept_N = residual_N[half:] + grad_N[half:]
        residual_N[half:] = 0
        made = super().encode(state, sent_N, residual_N=residual_N, buffer=buffer)
        residual_N[half:] += kept_N
        return made
