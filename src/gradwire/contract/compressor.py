"""Compressor: gradient to payload and back, and the traits that it declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache
from inspect import Parameter, signature
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..errors import InvalidSetting, UnknownName, invalid
from .payload import Format, Payload
from .spec import TensorSpec, working_dtype

# ---- Settings are given by name ------------------------------------------------------
#
# ``topk(density=0.01)``; errors say so, with the names there are.


class KeywordSettings:
    """Base of algorithms: keyword-only dataclasses of their settings.

    A setting without its name, or by a name that there is not, is refused as
    ``InvalidSetting``. Classes that are no such dataclasses take what they like.
    """

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        kind: type = cls
        known = _names(kind)
        if known is None:
            return super().__new__(cls)
        if args:
            accepted = f"given by name ({', '.join(known)})" if known else "left out"
            first = f"{known[0]}={args[0]!r}" if known else ""
            raise invalid(
                f"settings of {cls.__name__}",
                args,
                accepted,
                f"write {cls.__name__}({first})",
            )
        for name in settings:
            if name not in known:
                raise UnknownName(f"setting of {cls.__name__}", name, known)
        return super().__new__(cls)


@cache
def _names(cls: type) -> list[str] | None:
    """A class's settings; its own come before its bases'.

    None if it is not of that form.
    """
    init = cls.__init__  # type: ignore[misc]
    if init is object.__init__:
        return []
    if not is_dataclass(cls) or "__init__" not in vars(cls):
        return None
    _, *settings = signature(init).parameters.values()
    if any(setting.kind is not Parameter.KEYWORD_ONLY for setting in settings):
        return None
    inherited = getattr(super(cls, cls), "__dataclass_fields__", {})
    names = [setting.name for setting in settings]
    return sorted(names, key=lambda name: name in inherited)


# ---- compressors ---------------------------------------------------------------------


State = Any
"""Whatever an algorithm keeps between steps: None, a tensor, or a NamedTuple of states.

Numbers in it are finite, and integers count: from 0 to ``MOST_COUNTED``. What a
checkpoint holds beyond that is refused as damaged, unless ``init`` makes such values
too. Integers are the same on all ranks, in a field whose name does not end in ``_N``:
checkpoints whose ranks differ are refused.
"""
MOST_COUNTED = 2**32 - 1

Residual = Tensor | None
"""The part of a gradient that was not sent, in the working dtype.

None where nobody keeps it.
"""
Memory = Tensor | None
"""Memory (uint8) for a payload; None: new memory."""


class Layout(Enum):
    """The kind of content that a payload holds.

    Attributes:
        DENSE: One value for each element.
        PACKED: Codes of several elements in a byte, and their scales.
        SPARSE: Indices and values of some elements.
        LOW_RANK: Factors of matrices.
        TRANSFORMED: Coefficients of a transform, such as the cosine transform.
    """

    DENSE = "dense"
    PACKED = "packed"
    SPARSE = "sparse"
    LOW_RANK = "low rank"
    TRANSFORMED = "transformed"


@dataclass(frozen=True, kw_only=True)
class Traits(KeywordSettings):
    """The promises of a compressor; ``pair`` decides by these and never by a name.

    Args:
        layout: The kind of content that a payload holds, a ``Layout``.
        lossless: ``decode(encode(x))`` is x, bit for bit, in the gradient's own dtype.
            Default: False.
        additive: Payloads may be summed element by element by a library all-reduce.
            Default: False.
        exact_size: The payload's size follows from the spec alone; else ``format`` is
            the largest there is. Default: True.
        unbiased: The expectation of ``decode(encode(x))`` is x. Default: False.
        unbiased_from: The least magnitude of an element that this is said of. Smaller
            elements may be lost. Default: 0.
        nonexpansive: ``||x - decode(encode(x))|| <= ||x||`` for every x within the wire
            dtype's range. Default: False.
        error_feedback: Trains well only if the unsent part of a gradient is kept for
            the next step. Default: False.
        reads_latest: The payload depends on the gradient and the residual apart, and
            not on their sum alone. Default: False.
        shared_scale: Elements share numbers of the decoder, such as a scale or a mean.
            So tensors that travel in one message are encoded apart. For a CompLL
            program this follows from its fields. Default: False.
        shared_support: All ranks select the same elements, so an all-reduce can sum the
            values. Default: False.
        density_range: The least and the most selected elements, as factors of
            ``density``. The most holds for every gradient. The least holds if 64
            elements or more are asked for. The gradient must have as many elements that
            are not 0. None (the default): no density.
        whole_tensors: An exchange that needs whole tensors in their shapes. Default:
            False.
        every_tensor: Each rank sends elements of every tensor in a message, except of
            tensors of zeros. Default: False.
        same_threads: Every rank computes the same values for itself. So all ranks need
            as many threads. Default: False.
        host_only: Encode runs on the host. Gradients of a device are copied to the host
            first. Default: False.
    """

    layout: Layout
    lossless: bool = False
    additive: bool = False
    exact_size: bool = True
    unbiased: bool = False
    unbiased_from: float = 0.0
    nonexpansive: bool = False
    error_feedback: bool = False
    reads_latest: bool = False
    shared_scale: bool = False
    shared_support: bool = False
    density_range: tuple[float, float] | None = None
    whole_tensors: bool = False
    every_tensor: bool = False
    same_threads: bool = False
    host_only: bool = False


class Compressor(KeywordSettings, ABC):
    """Encodes a flat gradient into a payload and back.

    Concrete compressors are frozen keyword-only dataclasses: settings only. What
    changes from step to step is the state, made by ``init`` and owned by the caller.
    """

    traits: ClassVar[Traits]
    """The traits of the default settings.

    An instance has its own where a setting changes them.
    """

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        """The variant that ``rank`` uses among ``world`` ranks; most depend on neither.

        ``rank`` may change what is encoded, as the random numbers that are drawn. It
        changes neither layouts, nor what a payload decodes to, nor the states that
        ``init`` makes.
        """
        return self

    def chunk(self, start: int, stop: int) -> Compressor:
        """The variant for elements ``start`` to ``stop`` of this one's gradient.

        Default: itself, as most are for any gradient.
        """
        return self

    def for_sums(self) -> Compressor:
        """The variant for a collective in which every rank encodes a partial sum again.

        It makes no vector larger, as the factors of all ranks would multiply. ``pair``
        takes it where ``Collective.encodes_sums`` is set. It changes neither layouts,
        nor what a payload decodes to, nor the states that ``init`` makes. Default:
        itself.
        """
        return self

    def init(self, spec: TensorSpec) -> State:
        """State before the first step. Default: none."""
        return None

    @abstractmethod
    def format(self, spec: TensorSpec) -> Format:
        """Layout, and so size, of the payload of a gradient of this spec.

        Where sizes vary (``traits.exact_size`` is False) it is the layout of the
        largest payload.
        """

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        """Layout of a payload of so many bytes.

        Raises ``InvalidSetting`` for a size that no payload of this spec has. Default:
        only ``format(spec)`` is known.
        """
        form = self.format(spec)
        if size_bytes != form.size_bytes:
            raise self.no_such_size(spec, size_bytes)
        return form

    def no_such_size(self, spec: TensorSpec, size_bytes: int) -> InvalidSetting:
        """The error that ``received`` raises for a size that no payload has."""
        most = self.format(spec).size_bytes
        return invalid(
            f"size of a payload of {spec.numel} elements of {spec.dtype} by {self!r}",
            size_bytes,
            f"{most} bytes"
            if self.traits.exact_size
            else f"whole fields of at most {most} bytes",
            "give every rank the same compressor and settings",
        )

    def typical(self, spec: TensorSpec) -> Format:
        """Layout of a payload of usual size, which plans and predictions use.

        Default: ``format(spec)``. Override it if most payloads are much smaller than
        that.
        """
        return self.format(spec)

    @abstractmethod
    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        """Encodes a gradient.

        Args:
            state: The state that ``init`` or the last ``encode`` returned.
            grad_N: The gradient. It is not written.
            residual_N: In the working dtype. The sum of gradient and residual is
                encoded, and the part of the sum that is not in the payload is left
                here.
            buffer: Memory for the payload: ``format(spec).size_bytes`` of uint8. A
                smaller payload lies at its front. None: new memory.

        Returns:
            The payload, and the new state.

        Raises:
            InvalidSetting: The gradient is not a flat tensor of a dtype that gradients
                may have.
        """

    @abstractmethod
    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        """Writes ``scale`` times the decoded gradient into ``out_N`` and returns it."""

    def is_decoded(self, *, scale: float) -> bool:
        """Whether an additive payload in ``out_N`` itself needs no ``decode``.

        Default: it needs ``decode``.
        """
        return False

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        """Adds ``scale`` times the decoded gradient to ``sum_N``.

        It is CaSync's merge after decode.
        """
        sum_N.add_(self.decode(payload, torch.empty_like(sum_N)), alpha=scale)

    def merge_all(
        self, payloads: Sequence[Payload], sum_N: Tensor, *, scale: float = 1.0
    ) -> None:
        """``merge`` of several payloads of one gradient into one sum, in their order.

        Default: one after another. A codec that decodes by a linear transform needs
        only one.
        """
        for payload in payloads:
            self.merge(payload, sum_N, scale=scale)

    @property
    def width(self) -> int:
        """Elements of a sparse payload that share one index.

        1 but where rows travel whole.
        """
        return 1

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """A sparse payload's entries: int32 indices_K and values_K.

        Indices ascend without duplicates.

        Values are decoded, in the working dtype. Default: the fields ``indices`` and
        ``values``. Where ``width`` is not 1, indices count units of so many elements,
        and there are as many values for each. Raises ``InvalidSetting`` where the
        payload has none.
        """
        names = {part.name for part in payload.format}
        if not {"indices", "values"} <= names:
            raise invalid(
                "payload",
                payload,
                "a sparse one, of indices and values",
                "use a sparse codec",
            )
        values_K = payload["values"]
        return payload["indices"], values_K.to(working_dtype(values_K.dtype))

    def encode_many(
        self,
        states: Sequence[State],
        grads: Sequence[Tensor],
        residuals: Sequence[Tensor | None] | None = None,
        buffers: Sequence[Tensor | None] | None = None,
    ) -> list[tuple[Payload, State]]:
        """``encode`` of several gradients, each bit for bit as alone.

        May be one kernel call.

        Batch compression: HiPress, section 3.2.
        """
        nothing = [None] * len(grads)
        operands = zip(
            states, grads, residuals or nothing, buffers or nothing, strict=True
        )
        return [
            self.encode(state, grad_N, residual_N=residual_N, buffer=buffer)
            for state, grad_N, residual_N, buffer in operands
        ]

    def decode_many(
        self, payloads: Sequence[Payload], outs: Sequence[Tensor], *, scale: float = 1.0
    ) -> None:
        """``decode`` of several payloads, each as alone; may be one kernel call."""
        for payload, out_N in zip(payloads, outs, strict=True):
            self.decode(payload, out_N, scale=scale)

    def merge_many(
        self, payloads: Sequence[Payload], sums: Sequence[Tensor], *, scale: float = 1.0
    ) -> None:
        """``merge`` of several payloads, each as alone into its own sum.

        May be one kernel call.
        """
        for payload, sum_N in zip(payloads, sums, strict=True):
            self.merge(payload, sum_N, scale=scale)
