"""Fingerprints: the facts that all ranks must share before a gradient is sent.

Where ranks differ, an error names the difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from ..errors import RankFailed, RanksDiffer
from ..version import __version__
from .failure.membership import Membership

Fingerprint = dict[str, Any]
Described = tuple[str, tuple[int, ...], str, str]
"""One tensor of the model: its name, shape, dtype and treatment."""

NETWORK = "network"
_SETTINGS, _TENSORS, _REFUSAL = "settings", "tensors", "refusal"


def fingerprint(
    tensors: Sequence[tuple[str, torch.Tensor, str]], settings: dict[str, object]
) -> Fingerprint:
    """Versions, settings, and every tensor's name, shape, dtype and treatment."""
    return {
        _SETTINGS: {
            "gradwire version": __version__,
            "torch version": torch.__version__.partition("+")[0],
            **{f"setting {name}": repr(value) for name, value in settings.items()},
        },
        _TENSORS: [(name, tuple(t.shape), str(t.dtype), how) for name, t, how in tensors],
    }


def agree(who: Membership, own: Fingerprint, timeout: timedelta) -> list[Any]:
    """Raises ``RanksDiffer`` on every rank if any rank refused or any two fingerprints differ.

    Returns what each rank tells under ``NETWORK``, which may differ.
    """
    if who.world == 1:
        return [own.get(NETWORK)]
    found = [json.loads(note) for note in who.share(json.dumps(own), timeout)]
    with who.lingering():
        for rank, other in enumerate(found):
            if refusal := refusal_in(other):
                raise RanksDiffer(f"rank {rank} refused to attach: {refusal}")
        for rank, other in enumerate(found):
            if differs := difference(found[0], other):
                raise RanksDiffer(
                    f"rank 0 and rank {rank} do not train the same thing: {differs}; start all "
                    "ranks with the same model, settings and versions"
                )
    return [other.get(NETWORK) for other in found]


def post_refusal(who: Membership, error: Exception) -> None:
    """Tells the other ranks, who may wait for this one, why it refuses to go on.

    It gives those that do wait the time to hear it.
    """
    if who.world > 1:
        with suppress(RankFailed):  # of the store, beside the error that matters
            who.post(json.dumps({_REFUSAL: f"{type(error).__name__}: {error}"}))
            who.linger()


def refusal_in(told: dict[str, Any]) -> str | None:
    """The reason why a rank refused; None if it did not."""
    return told.get(_REFUSAL)


def difference(one: Fingerprint, other: Fingerprint) -> str | None:
    """The first thing in which two ranks' fingerprints differ; None if they are the same."""
    for key, value in one[_SETTINGS].items():
        if value != other[_SETTINGS].get(key):
            return f"{key} is {value} against {other[_SETTINGS].get(key)}"
    for a, b in zip(one[_TENSORS], other[_TENSORS], strict=False):
        if a != b:
            return f"{_shown(a)} against {_shown(b)}"
    a, b = len(one[_TENSORS]), len(other[_TENSORS])
    return f"{a} parameters and buffers against {b}" if a != b else None


def _shown(tensor: Described) -> str:
    name, shape, dtype, how = tensor
    return f"{name} {list(shape)} {dtype.removeprefix('torch.')} ({how})"
