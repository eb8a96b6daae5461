"""Memory of a rank beside weights and gradients: the bytes that its messages keep, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ...contract import Member, State
from ...contract.scratch import passing_bytes
from ...contract.state import leaves
from ...exchange.error_feedback import residuals

if TYPE_CHECKING:
    from ..failure.commit import Commit

KINDS = ("residuals", "momentum", "state", "messages", "payloads", "buffers", "passing")
"""The kinds are what was not sent yet; velocities; the rest of states; copies of gradients; what is
sent and received; what a message needs in a later computation; and buffers that serve within one
computation, which all messages of this process share (see `passing`)."""
_MOMENTUM = ("velocity", "momentum")


def kept_bytes(state: State, member: Member) -> Counter[str]:
    """Bytes of a message's state and of its member's buffers, by kind."""
    found: Counter[str] = Counter()
    owed = {tensor.data_ptr() for tensor in residuals(state).values() if tensor.numel()}
    for path, tensor in leaves(state):
        is_momentum = path.rpartition(".")[2].startswith(_MOMENTUM)
        own = "momentum" if is_momentum else "state"
        found["residuals" if tensor.data_ptr() in owed else own] += tensor.nbytes
    for buffer in member.buffers.values():
        found["payloads" if buffer.dtype == torch.uint8 else "buffers"] += buffer.nbytes
    return found


def memory_of(
    messages: Iterable[Any], numel: int, commit: Commit | None = None
) -> dict[str, float]:
    """Bytes of all messages by kind, and their sum for each of the ``numel`` parameters.

    ``passing`` is of all threads of this process. ``commit`` keeps copies of states.
    """
    found = Counter(passing=passing_bytes(), state=0 if commit is None else commit.kept_bytes)
    for message in messages:
        found += kept_bytes(getattr(message, "state", None), message.member)
        found["messages"] += getattr(message, "buffer_bytes", 0)
    total = sum(found.values())
    return {**{kind: found[kind] for kind in KINDS}, "bytes_a_parameter": total / max(1, numel)}
