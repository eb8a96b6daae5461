"""StepMarks: behind what one step's copies run, and what its means are behind."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from ..device.streams import Copying, Mark, SideStream, Streams


class StepMarks:
    """Marks of one step, also if it is abandoned; there are none of gradients in host memory."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._ready: dict[str, Mark] = {}
        self._closing: list[Mark] = []
        self._over: dict[int, Mark] = {}

    def ready(self, name: str, grad: Tensor) -> None:
        """Leaves a mark behind the kernels that make a gradient."""
        if not grad.is_cpu and (mark := self._streams.mark(grad.device)) is not None:
            self._ready[name] = mark

    def close(self) -> None:
        """Leaves marks behind the whole backward pass."""
        self._closing += self._now()

    def _now(self) -> list[Mark]:
        """A mark on each device that has handed a gradient in."""
        found = {mark.device: self._streams.mark(mark.device) for mark in self._ready.values()}
        return [mark for mark in found.values() if mark is not None]

    def end(self, index: int, side: SideStream | None) -> None:
        """Leaves a mark behind a message, on the side stream that computed it."""
        if side is not None:
            self._over[index] = side.mark()

    def follow(self, indices: Iterable[int] | None = None) -> None:
        """Has the devices' current streams wait for messages; None stands for all."""
        chosen = self._over if indices is None else indices
        self._streams.follow(self._over[index] for index in chosen if index in self._over)

    def copying(self, names: Collection[str], side: SideStream | None, **counted: Any) -> Copying:
        """Makes the block in which gradients are copied from and to where they are encoded.

        It is behind their own marks and, where those are there already, behind the backward pass.
        """
        if not self._ready:
            return nullcontext
        marks, closing = [self._ready[n] for n in names if n in self._ready], self._closing
        if side is not None:
            return lambda: side.behind([*marks, *closing])
        return lambda: self._streams.behind([*marks, *closing], **counted)

    def __bool__(self) -> bool:
        """Whether a device has anything to do with this step."""
        return bool(self._ready or self._over)
