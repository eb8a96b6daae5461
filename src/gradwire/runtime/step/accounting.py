"""Accounting of density: how many elements a step's messages selected, and what ranks still owe.

After each step every message has a ``Member.selection``: how many elements it selected. The sums
over messages give the step's densities. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...contract import Selection
from ...contract.trace.density import StepDensity
from ...errors import InvalidSetting
from ...exchange.error_feedback import chooser_of, residuals
from ..device.staging import Staging
from .driver import OFFLOAD
from .messages import Message


def density_of_step(
    messages: Iterable[Message], *, rank: int, step: int, end_s: float, sent_bytes: int
) -> StepDensity | None:
    """The last step's density over all messages; None where no message selects elements."""
    found: list[tuple[int, Selection]] = [
        (message.own_numel, message.member.selection)
        for message in messages
        if message.member.selection is not None
    ]
    numel = sum(numel for numel, _ in found)
    if not numel:
        return None
    asked = sum(selection.asked for _, selection in found)
    return StepDensity(
        rank,
        step,
        end_s,
        sent_bytes,
        numel=numel,
        asked=None if math.isnan(asked) else asked,
        selected=sum(selection.selected for _, selection in found),
        arrived=sum(selection.arrived for _, selection in found),
    )


def adapted(messages: Iterable[Message]) -> dict[str, str]:
    """The settings of each layer, in words, by parameter name; empty without ``adapt``."""
    found: dict[str, str] = {}
    for message in messages:
        own = chooser_of(message.exchange)
        if own is not None:
            names = (slot.name for slot in message.slots)
            found.update(zip(names, own.settings(message.state), strict=True))
    return found


def spread(messages: Iterable[Any]) -> dict[str, Any]:
    """Figures of the last step's sparse messages: the way that each embedding's rows took, and the
    largest imbalance of a push and of a pull (None where no message was cut into parts)."""
    members = [(message.names, message.member) for message in messages]
    parts = [member.imbalance for _, member in members if member.imbalance is not None]
    return {
        "ways": {name: member.way for names, member in members if member.way for name in names},
        "push_imbalance": max((one.push for one in parts), default=None),
        "pull_imbalance": max((one.pull for one in parts), default=None),
    }


def norm_over_all(tensors: Iterable[Tensor]) -> float:
    """The norm of tensors as one vector, whose squares are added up in float64."""
    norms = (torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors)
    return math.hypot(*map(float, norms))


def whereabouts(
    messages: Sequence[Any], staging: Staging, num_steps: int, backend: Mapping[str, Any]
) -> dict[str, Any]:
    """Figures of where messages are encoded, and of what a step copies for that.

    Messages are counted by their gradients' device, or under "cpu" where gradients are copied to
    the host first. Bytes are of payloads and, where the host encodes, of gradients; row-sparse ones
    aside. Payloads pass through ``pinned_bytes`` of host memory. So do tensors that a plan has
    encoded ``early``: ``offloaded`` counts them, and their bytes on the way to the host.
    ``backend`` names what carries payloads ``within_hosts`` and ``between_hosts``, and says ``why``
    NCCL cannot (see `backends`).
    """
    steps = max(1, num_steps)
    lanes = [lane for one in messages for lane in getattr(one, "lanes", {}).values()]
    offloaded = {"tensors": lanes.count(OFFLOAD), "bytes_per_step": staging.offloaded_bytes / steps}
    return {
        "backend": dict(backend),
        "encoded_on": dict(Counter(str(message.device) for message in messages)),
        "to_host_bytes_per_step": staging.to_host_bytes / steps,
        "to_device_bytes_per_step": staging.to_device_bytes / steps,
        "pinned_bytes": staging.pinned_bytes,
        "offloaded": offloaded,
    }


OUTGROWN = 100.0
"""The most that the norm of a tensor's residual may be, in norms of its gradient.

Where elements are selected, the limit is this number divided by the density. In trainings that go
well the residual's norm is a few tens of the gradient's at most.
"""


def outgrown(messages: Iterable[Message]) -> list[tuple[str, float]]:
    """Tensors whose residual has outgrown their gradient beyond ``OUTGROWN``, the worst first.

    Each comes with the norm of its residual over that of its gradient in the last step that noted
    norms.
    """
    found: list[tuple[str, float]] = []
    for message in messages:
        kept = list(residuals(message.state).values())
        if not kept or not message.norms:  # none were noted yet
            continue
        taken, numel = message.member.selection, message.own_numel
        density = taken.asked / numel if taken is not None and taken.asked > 0 else 1.0
        for slot, norm in zip(message.slots, message.norms, strict=True):
            parts = (message.part(slot, residual_N) for residual_N in kept)
            owed = math.hypot(*(float(part.norm()) for part in parts))
            if math.isfinite(norm) and owed > OUTGROWN / density * norm > 0:
                found.append((str(slot), owed / norm))
    return sorted(found, key=lambda one: -one[1])


def mean_residual_norm(stats: Sequence[Mapping[str, Any]]) -> float:
    """The error of a sparsifier: the mean over ranks of the norms of their residuals.

    Source: DEFT (ICPP 2023), equation 2. ``stats`` holds the result of ``handle.stats()`` of every
    rank at one step, in any order. The caller gathers them, for instance by
    ``torch.distributed.all_gather_object``, which then all ranks must call.

    >>> mean_residual_norm([{"rank": r, "world_size": 2, "residual_norm": r + 1.0} for r in (1, 0)])
    1.5
    """
    ranks = sorted(int(one["rank"]) for one in stats)
    world = int(stats[0]["world_size"]) if stats else 1
    if ranks != list(range(world)):
        raise InvalidSetting(
            f"mean_residual_norm needs the stats of all {world} ranks once each, got those of "
            f"ranks {ranks}; gather handle.stats() of every rank"
        )
    return math.fsum(one["residual_norm"] for one in stats) / world
