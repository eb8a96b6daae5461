"""The contracts: what a compressor and an exchange are, and what they declare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from .collective._verbs import Compute, Steps
from .errors import InvalidSetting, invalid
from .member import Imbalance as Imbalance
from .member import Member as Member
from .member import Selection as Selection
from .member import Shards as Shards
from .payload import Format, Payload
from .spec import TensorSpec, working_dtype

State = Any
"""Whatever an algorithm keeps between steps: None, a tensor, or a NamedTuple of states.

Numbers in it are finite, and integers count: from 0 to ``MOST_COUNTED``. What a checkpoint holds
beyond that is refused as damaged, unless ``init`` makes such values too.
"""
MOST_COUNTED = 2**32 - 1


class Layout(Enum):
    """The kind of content that a payload holds."""

    DENSE = "dense"
    PACKED = "packed"
    SPARSE = "sparse"
    LOW_RANK = "low rank"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The promises of a compressor; ``pair`` decides by these and never by a name."""

    layout: Layout
    lossless: bool = False
    """decode(encode(x)) is x, bit for bit, in the gradient's own dtype."""
    additive: bool = False
    """Payloads may be summed element by element by a library all-reduce."""
    exact_sum: bool = True
    """A sum of payloads is as accurate as one in the gradient's working dtype."""
    exact_size: bool = True
    """The payload's size follows from the spec alone; else ``format`` is the largest there is."""
    unbiased: bool = False
    """The expectation of decode(encode(x)) is x."""
    contraction: bool = False
    """||x - decode(encode(x))|| <= ||x|| for every x within the wire dtype's range."""
    error_feedback: bool = False
    """Trains well only if what was not sent is kept for the next step."""
    reads_latest: bool = False
    """The payload depends on the gradient and the residual apart, and not on their sum alone."""
    shared_scale: bool = False
    """Elements share numbers that they are decoded with, as a scale or a mean.

    So tensors that travel in one message are encoded apart. A program in the language need not say
    so: it follows from its fields.
    """
    shared_support: bool = False
    """All ranks take the same elements, so values at them are summed by an all-reduce."""
    density_range: tuple[float, float] | None = None
    """Least and most that is taken, as factors of the ``density`` asked for; None: none is.

    Both hold for every gradient; the least where 64 elements or more are asked for, and as many are
    not 0.
    """
    whole_tensors: bool = False
    """Acts on tensors in their shapes: an exchange that must get them uncut."""
    same_threads: bool = False
    """Every rank computes for itself what all must hold alike, and does so with as many threads."""


class Compressor(ABC):
    """Encodes a flat gradient into a payload and back.

    Concrete compressors are frozen keyword-only dataclasses: settings only. What changes from step
    to step is the state, made by ``init`` and owned by the caller.
    """

    traits: ClassVar[Traits]
    """The traits of the default settings; an instance has its own where a setting changes them."""

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        """The variant that ``rank`` uses among ``world`` ranks; most depend on neither.

        ``rank`` may change what is encoded, as the random numbers that are drawn. It changes
        neither layouts, nor what a payload decodes to, nor the states that ``init`` makes.
        """
        return self

    def chunk(self, start: int, stop: int) -> Compressor:
        """The variant for elements ``start`` to ``stop`` of the gradient that this one is for.

        Default: itself, as most are for any gradient.
        """
        return self

    def init(self, spec: TensorSpec) -> State:
        """State before the first step. Default: none."""
        return None

    @abstractmethod
    def format(self, spec: TensorSpec) -> Format:
        """Layout, and so size, of the payload of a gradient of this spec.

        Where sizes vary (``traits.exact_size`` is False) it is the layout of the largest payload.
        """

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        """Layout of a payload of so many bytes.

        Raises ``InvalidSetting`` for a size that no payload of this spec has. Default: only
        ``format(spec)`` is known.
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
            f"{most} bytes" if self.traits.exact_size else f"whole fields of at most {most} bytes",
            "give every rank the same compressor and settings",
        )

    def typical(self, spec: TensorSpec) -> Format:
        """Layout of a payload as large as is usual: what plans and predictions count with.

        Default: ``format(spec)``. Where sizes vary and are mostly far below the largest, say so.
        """
        return self.format(spec)

    @abstractmethod
    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Tensor | None = None,
        buffer: Tensor | None = None,
    ) -> tuple[Payload, State]:
        """Encodes ``grad_N`` (never written); refuses what ``check_gradient`` in spec.py does.

        With ``residual_N`` (working dtype) the sum of both is encoded, and ``residual_N`` then
        holds what of that sum the payload lacks. ``buffer`` (uint8, ``format(spec).size_bytes``
        long) is where the payload is to lie; without it a new one is made. A payload that is
        smaller than that lies at the buffer's front, and what is behind it is undefined.
        """

    @abstractmethod
    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        """Writes ``scale`` times the decoded gradient into ``out_N`` and returns it."""

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        """Adds ``scale`` times the decoded gradient to ``sum_N``: CaSync's merge after decode."""
        sum_N.add_(self.decode(payload, torch.empty_like(sum_N)), alpha=scale)

    @property
    def width(self) -> int:
        """Elements of a sparse payload that share one index; 1 but where rows travel whole."""
        return 1

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """A sparse payload's entries: (indices_K int32, ascending, without duplicates; values_K).

        Values are decoded, in the working dtype. Default: the fields ``indices`` and ``values``.
        Where ``width`` is not 1, indices count units of so many elements, and there are as many
        values for each. Raises ``InvalidSetting`` where the payload has none.
        """
        names = {part.name for part in payload.format}
        if not {"indices", "values"} <= names:
            raise invalid(
                "payload", payload, "a sparse one, of indices and values", "use a sparse codec"
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
        """``encode`` of several gradients, each bit for bit as alone; may be one kernel call.

        Batch compression: HiPress, section 3.2.
        """
        nothing = [None] * len(grads)
        operands = zip(states, grads, residuals or nothing, buffers or nothing, strict=True)
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
        """``merge`` of several payloads, each as alone into its own sum; may be one kernel call."""
        for payload, sum_N in zip(payloads, sums, strict=True):
            self.merge(payload, sum_N, scale=scale)


Result = tuple[Tensor, Tensor, State]
"""(mean_N in the gradient's dtype, contributed_N in the working dtype, new state)."""


class Exchange(ABC):
    """Averages one flat gradient over ranks.

    ``contributed_N`` is what of this rank's gradient is in the mean: its sum over ranks is W times
    the mean. Subclasses write ``synchronise``, the form that allocates nothing, or ``run``, which
    is easier to read, or both with the same results: each is given here in terms of the other.
    """

    traits: ClassVar[Traits | None] = None
    """The traits of an algorithm in ``compress/`` that is an exchange of its own; else None."""

    @property
    def keeps_whole(self) -> bool:
        """Whether it acts on tensors in their shapes, so that none may be cut among messages."""
        return self.traits is not None and self.traits.whole_tensors

    @property
    def same_threads(self) -> bool:
        """Whether all ranks must have the same ``torch.get_num_threads()``."""
        return self.traits is not None and self.traits.same_threads

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.run is Exchange.run and cls.synchronise is Exchange.synchronise:
            raise TypeError(f"{cls.__name__} defines neither run nor synchronise; define one")

    @abstractmethod
    def init(self, spec: TensorSpec, world: int) -> State:
        """State before the first step."""

    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Result]:
        """One step: returns (mean_N, contributed_N, state). ``grad_N`` is not written."""
        residual_N = torch.zeros(
            grad_N.numel(), dtype=working_dtype(grad_N.dtype), device=grad_N.device
        )
        mean_N = torch.empty_like(grad_N, memory_format=torch.contiguous_format)
        state = yield from self.synchronise(Member(rank, world), state, grad_N, mean_N, residual_N)
        return mean_N, grad_N.to(residual_N.dtype) - residual_N, state

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        """``run`` into a buffer: leaves the mean in ``out_N`` (which may be ``grad_N``).

        With ``residual_N`` (working dtype) the sum of both is exchanged, and ``residual_N``
        afterwards holds what of it did not arrive; it is finite whatever the gradient was.
        """
        return synchronise_by_run(self, me, state, grad_N, out_N, residual_N)

    def wire_bytes(self, spec: TensorSpec, world: int) -> list[int] | None:
        """Bytes that each rank sends for one gradient, the network's own headers aside.

        None where the exchange does not state them, as where they vary with the gradient's values.
        """
        return None

    def expected_bytes(self, spec: TensorSpec, world: int) -> list[int] | None:
        """``wire_bytes`` of payloads of typical size where sizes vary: predictions use them."""
        return self.wire_bytes(spec, world)


def synchronise_by_run(
    exchange: Any,
    me: Member,
    state: State,
    grad_N: Tensor,
    out_N: Tensor,
    residual_N: Tensor | None,
) -> Steps[State]:
    """``Exchange.synchronise`` in terms of ``run``.

    The exchange was initialised for the gradient's dtype and gets the sum in that; what this
    rounding of the sum drops stays in the residual, as all that was not contributed does.
    """
    sent_N = grad_N
    if residual_N is not None:
        pending_N = residual_N

        def add() -> Tensor:
            return pending_N.add_(grad_N).to(grad_N.dtype, copy=True)

        sent_N = yield Compute("accumulate", add, grad_N.numel())
    mean_N, contributed_N, state = yield from exchange.run(me.rank, me.world, state, sent_N)

    def finish() -> None:
        out_N.copy_(mean_N)
        if residual_N is not None:
            residual_N.sub_(contributed_N)
            torch.nan_to_num_(residual_N, nan=0.0, posinf=0.0, neginf=0.0)

    yield Compute("finish", finish, grad_N.numel())
    return state


def synchronise_alone(grad_N: Tensor, out_N: Tensor, residual_N: Tensor | None) -> Steps[None]:
    """``Exchange.synchronise`` of a single rank: nothing is sent, so nothing is lost.

    Plain training, bit for bit; where more ranks have left a residual, that arrives now, but for
    what a 16-bit gradient cannot hold beside it.
    """

    def decode() -> None:
        if residual_N is None or not bool(residual_N.any()):
            out_N.copy_(grad_N)
        else:
            out_N.copy_(residual_N.add_(grad_N))
            residual_N.sub_(out_N)
            torch.nan_to_num_(residual_N, nan=0.0, posinf=0.0, neginf=0.0)

    yield Compute("decode", decode, grad_N.numel())
