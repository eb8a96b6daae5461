"""The saved state of local steps' outer optimizer: its form, and its merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from ...contract.bounds import check_whole
from ...errors import InvalidSetting, invalid
from .table import MOST_STEPS

NO_LOADS = (0, 0)
_DICTS = ("anchors", "parameters", "arriving", "optimizer")
_KINDS: dict[str, type] = {**dict.fromkeys(_DICTS, dict), "position": int, "left": int}
_LOADS_END = 2**32
DAMAGED = "load an undamaged checkpoint of the same model"


def check_outer(saved: Any, whose: str = "the state") -> None:
    """Raises ``InvalidSetting`` unless ``saved`` has local steps' keys and types."""
    for key, kind in _KINDS.items():
        if not isinstance(saved, dict) or type(saved.get(key)) is not kind:
            raise InvalidSetting(
                f"{whose} is not one of local steps: its {key} is missing or no "
                f"{kind.__name__}; "
                "pass what the handle of local_steps returned from state_dict()"
            )
    for key in ("position", "left"):
        what = f"{key} in the period of {whose}"
        check_whole(what, saved[key], DAMAGED, least=0, most=MOST_STEPS)
    loads = saved.get("loads", NO_LOADS)
    is_pair = isinstance(loads, tuple | list) and len(loads) == len(NO_LOADS)
    if not is_pair or not all(
        type(load) is int and 0 <= load < _LOADS_END for load in loads
    ):
        raise invalid(
            f"loads of {whose}",
            loads,
            f"two integers from 0 to {_LOADS_END - 1}",
            DAMAGED,
        )


def merged_outer(olds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The outer state of any rank among other ranks, from all old state_dicts.

    Parameters are the old ranks' mean. Anchors must be the same on all old ranks; all
    else is taken from the first.
    """
    for old in olds:
        check_outer(old.get("outer"), f"the state of rank {old['rank']}")
    first = olds[0]["outer"]
    for old in olds[1:]:
        for name in first["anchors"]:
            other = old["outer"]["anchors"].get(name)
            if other is None or not torch.equal(first["anchors"][name], other):
                raise InvalidSetting(
                    f"the anchors of {name} of rank 0 and rank {old['rank']} "
                    "differ, and all ranks "
                    "have the same; load undamaged checkpoints of one moment"
                )
    merged: dict[str, Any] = deepcopy(first)
    for name, param in merged["parameters"].items():
        each = (old["outer"]["parameters"][name] for old in olds)
        wide = [tensor.detach().double().cpu() for tensor in each]
        param.copy_(torch.stack(wide).mean(0))
    return merged
