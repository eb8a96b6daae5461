"""Ranks of this process that exchange step after step, and what they allocate.

It names no further package, so that tests of the library alone can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.contract import Exchange, Member
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Steps
from gradwire.exchange.local import drive


class Run:
    """Ranks that keep their members and states from step to step, and what they sent in
    all.
    """

    def __init__(
        self, exchange: Exchange, spec: TensorSpec, world: int, order: int = 0
    ) -> None:
        self.exchange = exchange
        self.members = [Member(rank, world, order) for rank in range(world)]
        self.states: list[Any] = [exchange.init(spec, world) for _ in range(world)]
        self.sent_bytes = [0] * world

    def step(self, grads: Sequence[Tensor], seed: int = 0) -> Tensor:
        """One step in place of copies of ``grads``; all ranks' mean."""
        outs = [grad_N.clone() for grad_N in grads]
        outcome = drive(
            self._all_steps(outs),
            seed=seed,
            ranks_per_host=self.exchange.ranks_per_host,
        )
        self.states = outcome.results
        self.sent_bytes = [
            a + b for a, b in zip(self.sent_bytes, outcome.sent_bytes, strict=True)
        ]
        assert all(_same_bits(out_N, outs[0]) for out_N in outs)
        return outs[0]

    def allocated(self, grads: Sequence[Tensor]) -> int:
        """The elements of the largest tensor that is made by one step in place of
        ``grads``.
        """
        all_steps = self._all_steps(grads)
        with Allocations() as seen:
            self.states = drive(all_steps).results
        return max(seen.numels, default=0)

    def _all_steps(self, grads: Sequence[Tensor]) -> list[Steps[Any]]:
        each = zip(self.members, self.states, grads, strict=True)
        return [self.exchange.synchronise(*own, own[2]) for own in each]


def _same_bits(a_N: Tensor, b_N: Tensor) -> bool:
    return torch.equal(a_N.view(torch.uint8), b_N.view(torch.uint8))


class Allocations(TorchDispatchMode):
    """Elements of every new tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        self.numels += [
            t.numel()
            for t in _tensors(result)
            if t.untyped_storage().data_ptr() not in given
        ]
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return (
        [t for p in parts for t in _tensors(p)]
        if isinstance(value, dict | list | tuple)
        else []
    )
