"""Heal: a newcomer takes over from rank 0 all that ranks share, bit for bit.

These are parameters, buffers, the state of the optimizer and of the loss's scaler, and what the
exchange keeps. A field of the exchange with a value for each element, such as a residual, is the
rank's own. There a newcomer begins with zeros, and the others scale theirs by new over old number
of ranks, as ``redistribute`` does: a mean over more ranks delivers less of each.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..verbs import Recv, Send
from . import checkpoint
from .messages import Message
from .wire import Channel, carry_out

_PART_BYTES = 2**25
"""Bytes that travel at once; each part may take as long as a message."""
_NOBODY = checkpoint.Origin("", 1, 0, "")


class Healing(NamedTuple):
    """The parts of one attached model's training that all ranks share.

    ``tensors`` returns parameters and buffers. ``fingerprint`` is what a newcomer must share.
    """

    tensors: Callable[[], list[Tensor]]
    optimizer: Optimizer | None
    scaler: GradScaler | None
    fingerprint: str

    def packed(self, messages: Sequence[Message]) -> Tensor:
        """All of it as bytes in host memory."""
        assert self.optimizer is not None
        buffer = io.BytesIO()
        parts = {
            "tensors": [tensor.detach().cpu() for tensor in self.tensors()],
            "optimizer": self.optimizer.state_dict(),
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "exchange": checkpoint.collect(messages, _NOBODY),
        }
        torch.save(parts, buffer)
        return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)

    def take_over(self, data: Tensor, messages: Sequence[Message]) -> None:
        """Puts what ``packed`` has made on another rank in this one's place."""
        parts = torch.load(
            io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True
        )
        assert self.optimizer is not None
        with torch.no_grad():
            for tensor, found in zip(self.tensors(), parts["tensors"], strict=True):
                tensor.copy_(found)
        self.optimizer.load_state_dict(parts["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(parts["scaler"])
        scale_own(parts["exchange"], 0.0)
        for message, state in zip(
            messages, checkpoint.moved(parts["exchange"], messages), strict=True
        ):
            message.state = state


def scale_own(saved: Mapping[str, Any], factor: float) -> None:
    """Scales, in a collected state, all that has a value for each element."""
    for fields in saved["params"].values():
        for path, values in fields.items():
            if path.endswith("_N"):
                values.copy_(values * factor)


def send(data: Tensor, dst: int, channel: Channel) -> None:
    """Sends bytes to another rank, in parts."""
    carry_out([Send(dst, torch.tensor([data.numel()]))], [channel])
    for part in torch.split(data, _PART_BYTES):
        carry_out([Send(dst, part)], [channel])


def receive(src: int, channel: Channel) -> Tensor:
    """The bytes that another rank sends."""
    size = torch.zeros(1, dtype=torch.int64)
    carry_out([Recv(src, size)], [channel])
    data = torch.empty(int(size), dtype=torch.uint8)
    for part in torch.split(data, _PART_BYTES):
        carry_out([Recv(src, part)], [channel])
    return data
