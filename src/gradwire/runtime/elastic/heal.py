"""Heal: a newcomer takes over from rank 0 all that ranks share, bit for bit.

These are parameters, buffers, the state of the optimizer and of the loss's scaler, and what the
exchange keeps. A field of the exchange with a value for each element, such as a residual, is the
rank's own. There a newcomer begins as before a first step, and the others scale theirs by new over
old number of ranks, as ``redistribute`` does: a mean over more ranks delivers less of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..state import checkpoint
from ..state.plain import packed, read_packed
from ..step.messages import Message


class Healing(NamedTuple):
    """The parts of one attached model's training that all ranks share.

    ``tensors`` returns parameters and buffers. ``fingerprint`` is what a newcomer must share.
    """

    tensors: Callable[[], list[Tensor]]
    optimizer: Optimizer | None
    scaler: GradScaler | None
    timeout: timedelta
    fingerprint: str

    def packed(self, messages: Sequence[Message]) -> Tensor:
        """All of it as bytes in host memory."""
        optimizer, scaler = self[1:3]
        kept = checkpoint.collect(messages)
        _, kept["params"] = checkpoint.parted(kept["params"])
        parts = {
            "tensors": [tensor.detach().cpu() for tensor in self.tensors()],
            "optimizer": optimizer and optimizer.state_dict(),
            "scaler": scaler and scaler.state_dict(),
            "exchange": kept,
        }
        return packed(parts)

    def take_over(self, data: Any, messages: Sequence[Message]) -> None:
        """Puts what ``packed`` has made on another rank in this one's place."""
        parts = read_packed(data)
        with torch.no_grad():
            for tensor, found in zip(self.tensors(), parts["tensors"], strict=True):
                tensor.copy_(found)
        for owner, state in (self.optimizer, parts["optimizer"]), (self.scaler, parts["scaler"]):
            if owner is not None:
                owner.load_state_dict(state)
        checkpoint.move(parts["exchange"], messages)
