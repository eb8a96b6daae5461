"""Training on one process with means that come late, and the same training with them at
once.

A mean here is three quarters of the gradient, so nobody can mistake a gradient for its
mean; until it has arrived the gradient's storage is NaN, so whoever reads it early
spoils everything after.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.errors import RankFailed
from gradwire.runtime.overlap.overlap import Overlap

SHARE = 0.75


class LateMeans:
    """Arrivals that come when they are waited for, or, with ``seed``, some of them
    earlier.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._means: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self.waited: list[tuple[str, ...]] = []
        self.followed: list[tuple[str, ...]] = []
        self.num_finished = 0
        self.lost: RankFailed | None = None

    @property
    def synchroniser(self) -> LateMeans:
        """It is asked what has arrived, and told what is followed."""
        return self

    def take(self, grads: dict[str, Tensor]) -> None:
        """A backward pass has ended."""
        assert not self._means, "the step before is not finished"
        self.grads = grads
        self._means = {name: _values(grad) * SHARE for name, grad in grads.items()}
        for grad in grads.values():
            _values(grad).fill_(float("nan"))

    def deliver(self, *names: str) -> None:
        """The means of ``names`` come over the network."""
        if self.lost is not None:
            raise self.lost
        for name in names:
            if name in self._means:
                _values(self.grads[name]).copy_(self._means.pop(name))

    def arrived(self, name: str) -> bool:
        if self._random is not None and self._random.random() < 0.5:
            self.deliver(name)
        return name not in self._means

    def wait(self, names: Sequence[str]) -> None:
        self.waited.append(tuple(names))
        self.deliver(*names)

    def follow(self, names: Sequence[str]) -> None:
        early = [name for name in names if name in self._means]
        assert not early, f"followed before they arrived: {early}"
        self.followed.append(tuple(names))

    def finish(self) -> None:
        self.deliver(*self._means)
        self.num_finished += 1

    def give_up(self, text: str) -> BaseException:
        return RankFailed(f"on rank 0 of 1 {text}", ranks=(0,), step=0)


def _values(grad: Tensor) -> Tensor:
    """What a gradient stores, its rows alone if it is sparse."""
    return grad.detach()._values() if grad.is_sparse else grad.detach()


class Rig:
    """Calls an `Overlap` as the runtime does; with ``arrivals`` None, plain training
    instead.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, arrivals: LateMeans | None
    ) -> None:
        self.arrivals = arrivals
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._is_open = False
        self.overlap: Overlap | None = None
        if arrivals is not None:
            self.overlap = Overlap(
                model, list(self.params.items()), optimizer, arrivals
            )
        for name, param in self.params.items():
            param.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        this = weakref.ref(self)  # what a hook of a parameter refers to is never freed

        def hook(param: Tensor) -> None:
            rig = this()
            if rig is not None:
                rig._accept(name)

        return hook

    def _accept(self, name: str) -> None:
        if not self._is_open:
            self._is_open = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self.overlap is not None:
            self.overlap.take(name)

    def _end(self) -> None:
        self._is_open = False
        grads = {name: param.grad for name, param in self.params.items()}
        present = {name: grad for name, grad in grads.items() if grad is not None}
        if self.overlap is None or self.arrivals is None:
            for grad in present.values():
                _values(grad).mul_(SHARE)
            return
        self.arrivals.take(present)
        self.overlap.defer(grads)

    def settle(self) -> None:
        """handle.synchronize()"""
        if self.overlap is not None:
            self.overlap.settle(None)


Loop = Callable[[nn.Module, Optimizer, Rig], Any]
Make = Callable[[nn.Module], Optimizer]


def run(
    model: nn.Module,
    make: Make,
    loop: Loop,
    arrivals: LateMeans | None,
    *,
    change: Callable[[Rig], None] = lambda rig: None,
) -> tuple[dict[str, Any], Rig]:
    """What a loop leaves behind: parameters, gradients, optimizer state, and what it
    returned.
    """
    model = copy.deepcopy(model)
    optimizer = make(model)
    rig = Rig(model, optimizer, arrivals)
    change(rig)
    torch.manual_seed(1)
    returned = loop(model, optimizer, rig)
    rig.settle()
    left = {
        "returned": returned,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "grads": [param.grad for param in model.parameters()],
    }
    return left, rig


def same(one: Any, two: Any) -> bool:
    """Whether two nests of tensors and numbers are equal, bit for bit; NaN equals
    nothing.
    """
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        if one.is_sparse and two.is_sparse:
            one, two = one.to_dense(), two.to_dense()
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


def batches(num: int, width: int = 13) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(6, width, generator=generator) for _ in range(num)]
