"""Every generated compressor: the methods of ``contract.Compressor``, by four kernels.

Kernels take float32 vectors that lie in one piece. Gradients of another dtype are converted to it
first, sums and residuals of another dtype are computed by torch from what was sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ..contract import Compressor, State
from ..contract.payload import Format, Payload
from ..contract.spec import TensorSpec, check_gradient
from ..errors import invalid
from .build import Call
from .coders import coding
from .interp import Draws
from .layout import most_kept, num_received, program_format
from .steps import Kernels, encode_dense, with_scalars

_NEXT_STEP = torch.tensor([0, 1], device="cpu")


class Generated(Compressor):
    """A compressor whose work is done by ``kernels()``."""

    @abstractmethod
    def kernels(self) -> Kernels:
        """The kernels under these settings."""

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        """A program with a ``seed`` draws other numbers on each rank.

        So the mean of W unbiased payloads has 1/W of the variance of one.
        """
        return _of_rank(self, rank) if rank and hasattr(self, "seed") else self

    def init(self, spec: TensorSpec) -> State:
        """(stream, step) if random numbers are drawn.

        Modules are loaded now and not in the first step. C++ is compiled now too, where the device
        of the spec is the CPU.
        """
        made, cpp = self.kernels(), spec.device == "cpu"
        code = coding(made.traced)
        if made.traced.keep is not None:
            _keeping()
        if cpp:
            made.built.library()
        if cpp and code is not None:
            code.field.coder.library()
        stream = crc32(spec.name.encode())
        return torch.tensor([stream, 0], device="cpu") if made.draws else None

    def format(self, spec: TensorSpec) -> Format:
        traced = self.kernels().traced
        format, code = (
            program_format(traced, spec.numel, most_kept(traced, spec.numel)),
            coding(traced),
        )
        return format if code is None else code.format(format)

    def holding(self, spec: TensorSpec, num_kept: int) -> Format:
        """The layout of a payload of so many kept elements, or of as many as there may be."""
        traced = self.kernels().traced
        return program_format(traced, spec.numel, min(num_kept, most_kept(traced, spec.numel)))

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        found = _received(self.kernels(), spec.numel, size_bytes)
        if found is None:
            raise self.no_such_size(spec, size_bytes)
        return found

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Tensor | None = None,
        buffer: Tensor | None = None,
    ) -> tuple[Payload, State]:
        if residual_N is None or _fits(residual_N):
            (sent,) = self._encode((state,), (grad_N,), (residual_N,), (buffer,))
            return sent
        whole_N = _checked(grad_N, residual_N) + residual_N
        if self.kernels().traced.reads_latest:
            near_N = residual_N.to(torch.float32).contiguous()
            ((payload, state),) = self._encode((state,), (grad_N,), (near_N,), (buffer,))
        else:
            ((payload, state),) = self._encode((state,), (whole_N,), (None,), (buffer,))
        left_N = whole_N - self.decode(payload, torch.empty_like(whole_N))
        residual_N.copy_(torch.where(left_N.isfinite(), left_N, residual_N))
        return payload, state

    def encode_many(
        self,
        states: Sequence[State],
        grads: Sequence[Tensor],
        residuals: Sequence[Tensor | None] | None = None,
        buffers: Sequence[Tensor | None] | None = None,
    ) -> list[tuple[Payload, State]]:
        nothing = [None] * len(grads)
        residuals = residuals or nothing
        if all(residual_N is None or _fits(residual_N) for residual_N in residuals):
            return self._encode(states, grads, residuals, buffers or nothing)
        return super().encode_many(states, grads, residuals, buffers)

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        self.decode_many((payload,), (out_N,), scale=scale)
        return out_N

    def decode_many(
        self, payloads: Sequence[Payload], outs: Sequence[Tensor], *, scale: float = 1.0
    ) -> None:
        made = self.kernels()
        whole = [out_N if _fits(out_N) else _float32_like(out_N) for out_N in outs]
        for payload, out_N in zip(payloads, outs, strict=True):
            _check_matching(made, payload, out_N)
        if made.traced.keep is None:
            made.built.run_many(made.decode, _decoding(made, "out", payloads, whole, scale))
        else:
            for payload, whole_N in zip(payloads, whole, strict=True):
                _keeping().merge_kept(made, payload, whole_N.zero_(), scale)
        for out_N, whole_N in zip(outs, whole, strict=True):
            if out_N is not whole_N:
                out_N.copy_(whole_N)

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        self.merge_many((payload,), (sum_N,), scale=scale)

    def merge_many(
        self, payloads: Sequence[Payload], sums: Sequence[Tensor], *, scale: float = 1.0
    ) -> None:
        made = self.kernels()
        for payload, sum_N in zip(payloads, sums, strict=True):
            _check_matching(made, payload, sum_N)
        if not all(map(_fits, sums)):
            for payload, sum_N in zip(payloads, sums, strict=True):
                sum_N.add_(self.decode(payload, torch.empty_like(sum_N), scale=scale))
        elif made.traced.keep is not None:
            for payload, sum_N in zip(payloads, sums, strict=True):
                _keeping().merge_kept(made, payload, sum_N, scale)
        else:
            made.built.run_many(made.merge, _decoding(made, "sum", payloads, sums, scale))

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        made = self.kernels()
        if made.traced.keep is None:
            return super().entries(payload)
        entries: tuple[Tensor, Tensor] = _keeping().entries_kept(made, payload)
        return entries

    def _encode(
        self,
        states: Sequence[State],
        grads: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        buffers: Sequence[Tensor | None],
    ) -> list[tuple[Payload, State]]:
        made = self.kernels()
        calls = [
            self._call(state, grad_N, residual_N)
            for state, grad_N, residual_N in zip(states, grads, residuals, strict=True)
        ]
        if made.stages:
            calls = with_scalars(made, calls)
        encoded = encode_dense if made.traced.keep is None else _keeping().encode_kept
        payloads = encoded(made, calls, buffers)
        later = (state if state is None else state + _NEXT_STEP for state in states)
        return list(zip(payloads, later, strict=True))

    def _call(self, state: State, grad_N: Tensor, residual_N: Tensor | None) -> Call:
        """The call that encodes a gradient: its operands, its length and its random numbers."""
        numel = _checked(grad_N, residual_N).numel()
        fits = grad_N if _fits(grad_N) else grad_N.to(torch.float32).contiguous()
        operands = {"gradient": fits}
        if residual_N is not None:
            operands["residual"] = residual_N
        return Call(operands, numel, self._draws(state))

    def _draws(self, state: State) -> Draws:
        """The numbers of this call: the key is the program's ``seed`` and the tensor's stream."""
        stream, step = (0, 0) if state is None else state.tolist()
        return Draws((getattr(self, "seed", 0) & 0xFFFFFFFF) + (stream << 32), step)


@cache
def _keeping() -> Any:
    """The module that only programs need which keep some elements."""
    from . import keeping

    return keeping


@lru_cache(maxsize=4096)
def _of_rank(codec: Any, rank: int) -> Compressor:
    """The program with a seed of its own: the multiplier is odd, so no two ranks share one."""
    found: Compressor = replace(codec, seed=(codec.seed + rank * 0x9E3779B9) & 0xFFFFFFFF)
    return found


def _fits(vector_N: Tensor) -> bool:
    return vector_N.dtype == torch.float32 and vector_N.is_contiguous()


def _float32_like(out_N: Tensor) -> Tensor:
    return torch.empty(out_N.numel(), dtype=torch.float32, device=out_N.device)


def _checked(grad_N: Tensor, residual_N: Tensor | None) -> Tensor:
    """The gradient; refuses what a kernel would read beyond: it trusts lengths."""
    check_gradient(grad_N)
    if residual_N is not None and (
        residual_N.shape != grad_N.shape or residual_N.device != grad_N.device
    ):
        given = f"{tuple(residual_N.shape)} on {residual_N.device}"
        accepted = f"{tuple(grad_N.shape)} on {grad_N.device}"
        raise invalid("residual", given, accepted, "begin with zeros like the gradient")
    return grad_N


def _received(made: Kernels, numel: int, size_bytes: int) -> Format | None:
    """The layout of a payload of so many bytes; None if no gradient of that length has one."""
    code = coding(made.traced)
    if code is not None:
        return code.received(program_format(made.traced, numel, 0), size_bytes)
    num_kept = num_received(made.traced, numel, size_bytes)
    return None if num_kept is None else program_format(made.traced, numel, num_kept)


def _check_matching(made: Kernels, payload: Payload, out_N: Tensor) -> None:
    """Refuses a payload of another length, program or device than what it is decoded into."""
    numel, buffer = out_N.numel(), payload.buffer
    if buffer is None or buffer.device != out_N.device:
        given = "size only" if buffer is None else f"on {buffer.device}"
        raise invalid("payload", given, f"on {out_N.device}", "decode where it came")
    if _received(made, numel, payload.size_bytes) != payload.format:
        accepted = f"one of {numel} elements by {made.traced.name}"
        raise invalid("payload", payload, accepted, "decode into a vector like the gradient")


def _decoding(
    made: Kernels, name: str, payloads: Sequence[Payload], vectors: Sequence[Tensor], scale: float
) -> list[Call]:
    """Calls that decode into (or add to) the buffer ``name``."""
    code = coding(made.traced)
    if code is not None:
        pairs = zip(payloads, vectors, strict=True)
        payloads = [
            code.decode(p, program_format(made.traced, to_N.numel(), 0)) for p, to_N in pairs
        ]
    return [
        Call({name: to_N, "scale": _factor(scale, to_N.device)}, to_N.numel(), Draws(), payload)
        for payload, to_N in zip(payloads, vectors, strict=True)
    ]


@lru_cache(maxsize=64)
def _factor(scale: float, device: torch.device) -> Tensor:
    return torch.full((1,), scale, dtype=torch.float32, device=device)  # waits for no device
