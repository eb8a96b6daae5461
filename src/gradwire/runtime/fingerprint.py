"""What all ranks must share before a gradient is sent, and the error that names what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._version import __version__
from ..errors import RanksDiffer
from .wire import Group, gather_objects

Fingerprint = dict[str, Any]


def fingerprint(
    params: Sequence[tuple[str, torch.Tensor]], settings: dict[str, object]
) -> Fingerprint:
    """Version, settings, and every parameter's name, shape and dtype."""
    return {
        "gradwire version": __version__,
        "torch version": torch.__version__.partition("+")[0],
        **{f"setting {name}": repr(value) for name, value in settings.items()},
        "parameters": [(name, tuple(p.shape), str(p.dtype)) for name, p in params],
    }


def compare(mine: Fingerprint, channel: Group) -> None:
    """Raises ``RanksDiffer`` on every rank if any two ranks' fingerprints differ."""
    found = gather_objects(mine, channel)
    for rank, other in enumerate(found):
        if difference := _difference(found[0], other):
            raise RanksDiffer(
                f"rank 0 and rank {rank} do not train the same thing: {difference}; start all "
                "ranks with the same model, settings and versions"
            )


def _difference(one: Fingerprint, other: Fingerprint) -> str | None:
    for key in one.keys() | other.keys():
        a, b = one.get(key), other.get(key)
        if a != b and key != "parameters":
            return f"{key} is {a} against {b}"
    for a, b in zip(one["parameters"], other["parameters"], strict=False):
        if a != b:
            return f"parameter {_shown(a)} against {_shown(b)}"
    a, b = len(one["parameters"]), len(other["parameters"])
    return f"{a} parameters that require a gradient against {b}" if a != b else None


def _shown(param: tuple[str, tuple[int, ...], str]) -> str:
    name, shape, dtype = param
    return f"{name} {list(shape)} {dtype.removeprefix('torch.')}"
