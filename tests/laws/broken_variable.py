"""Deliberately wrong where payloads vary in size: made of ``variable.above`` and its
collective.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.contract import State, Traits
from gradwire.contract.payload import Format, Payload
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import AllGather
from tests.laws.variable import Encoded, above


class states_half(above):
    """Its largest layout has room for half the elements."""

    def format(self, spec: TensorSpec) -> Format:
        return self.layout(spec, spec.numel // 2)


class reads_the_largest(above):
    """Takes every payload that arrives for the largest there is."""

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        return self.format(spec)


class reads_any_size(above):
    """Rounds a size that no payload has."""

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        return self.layout(spec, max(0, size_bytes // self.layout(spec, 1).size_bytes))


class expects_more_than_there_is(above):
    """Its typical payload is larger than its largest."""

    def typical(self, spec: TensorSpec) -> Format:
        return self.layout(spec, spec.numel + 1)


class writes_to_the_back(above):
    """Puts a small payload at the end of the buffer given."""

    def encode(self, state: State, grad_N: Tensor, **to: Any) -> Encoded:
        buffer = to.pop("buffer", None)
        payload, state = super().encode(state, grad_N, **to)
        if buffer is None or payload.buffer is None:
            return payload, state
        back = buffer[buffer.numel() - payload.size_bytes :]
        return Payload(payload.format, back.copy_(payload.buffer)), state


class claims_one_size(above):
    """Declares a size that follows from the spec, and expects another."""

    traits: ClassVar[Traits] = replace(above.traits, exact_size=True)


class spares_empty_payloads(allgather_sparse):
    """Leaves out the all-gather if no rank has anything to send: a verb less, by
    values.
    """

    def run(self, *given: Any) -> Generator[Any, Any, Any]:
        steps, result = super().run(*given), None
        while True:
            try:
                asked = steps.send(result)
            except StopIteration as stop:
                return stop.value
            spared = isinstance(asked, AllGather) and not asked.buf.numel()
            result = None if spared else (yield asked)
