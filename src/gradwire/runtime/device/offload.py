"""Offload: one tensor of a device, encoded by the host from pinned memory.

Source: SSFusion (ICDE 2026), section IV-C, steps 2 and 3: the gradient is copied to host memory
    that is kept, without a wait; a thread of its own selects from it; what it has selected is
    copied back without a wait.
Differences: it is the sum of residual and gradient that is copied, so the residual stays on the
    device. The copies take the device's side stream, on which all that is computed of gradients is
    in order.

The copy out is launched by the thread of the backward pass, behind the gradient's mark. The lane
``OFFLOAD`` waits for it, so the compute lane goes on to launch other messages' work.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from ...contract import Copies
from .streams import Mark, SideStream


class Offload:
    """The way of the tensor ``name`` of a message, in one step, to the host and back.

    Its pinned memory is written again in the next step. By then the host has waited for a place
    in the side stream that is behind all that was copied from there.
    """

    def __init__(self, copies: Copies, message: int, name: str, side: SideStream) -> None:
        self._copies, self._key, self._side = copies, (message, name), side
        self._there: list[Tensor] = []
        self._out: Mark | None = None

    @torch.no_grad()
    def leave(self) -> None:
        """Launches the copy to the host, and what the device computes before it."""
        side, staging = self._side, self._side.staging
        with side.use():
            held = next(self._copies)
            self._there = staging.rooms((*self._key, "out"), held, side.kind)
            for room, tensor in zip(self._there, held, strict=True):
                room.copy_(tensor, non_blocking=True)
                staging.to_host_bytes += room.nbytes
                staging.offloaded_bytes += room.nbytes
        self._out = side.mark()

    @torch.no_grad()
    def encode(self) -> None:
        """Waits for the copy and encodes it; launches the copy of that to the device."""
        side, staging = self._side, self._side.staging
        assert self._out is not None, "what is encoded has left before"
        self._out.event.synchronize()
        made = self._copies.send(tuple(self._there))
        rooms = staging.rooms((*self._key, "back"), made, side.kind)
        with side.use():
            back = tuple(torch.empty_like(one, device=side.device) for one in made)
            for room, one, tensor in zip(rooms, made, back, strict=True):
                room.copy_(one)
                tensor.copy_(room, non_blocking=True)
                staging.to_device_bytes += room.nbytes
            with suppress(StopIteration):
                self._copies.send(back)
                raise AssertionError("a text of two copies asks for a third")
