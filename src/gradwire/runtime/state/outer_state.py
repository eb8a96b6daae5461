"""The saved state of local steps' outer optimizer: its form, its cuts and merge."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract.bounds import check_whole
from ...contract.spec import working_dtype
from ...errors import InvalidSetting, invalid
from .table import MOST_STEPS

NO_LOADS = (0, 0)
_DICTS = ("anchors", "parameters", "arriving", "optimizer")
_KINDS: dict[str, type] = {**dict.fromkeys(_DICTS, dict), "position": int, "left": int}
_OUTER = "outer."
"""The beginning of the path of an outer tensor that is a parameter's field."""
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


class OuterForm(NamedTuple):
    """The parts of a rank's outer state."""

    order: Sequence[str]
    """The parameters in the outer optimizer's order."""
    parts: Mapping[str, Tensor]
    """The anchor of this rank's part of each parameter."""
    fields: Sequence[str]
    """Fields with a value for each element that a state has at some moments alone."""


class _Leaf(NamedTuple):
    """An entry of an outer state: a dict and a key in it, and the parameter's name."""

    held: dict[Any, Any]
    key: Any
    name: str
    path: str


def _leaves(outer: Mapping[str, Any], order: Sequence[str]) -> Iterator[_Leaf]:
    """All entries of an outer state that are of one parameter."""
    for kind in ("anchors", "parameters", "arriving"):
        for name in outer[kind]:
            yield _Leaf(outer[kind], name, name, f"{_OUTER}{kind}_N")
    for index, fields in outer["optimizer"]["state"].items():
        for key in fields:
            yield _Leaf(fields, key, order[index], f"{_OUTER}{key}_N")


def spread_outer(saved: Mapping[str, Any], form: OuterForm) -> None:
    """Makes outer tensors with a value for each element fields of their parameters.

    So they can be cut anew. An empty tensor takes the place of each.
    """
    params = saved["params"]
    for name in params:
        part = form.parts[name]
        for field in form.fields:
            # means travel in the working dtype, whatever anchors are kept in
            wide = working_dtype(part.dtype)
            dtype = wide if field == "arriving" else part.dtype
            blank = torch.zeros(part.numel(), dtype=dtype)
            params[name][f"{_OUTER}{field}_N"] = blank
    for held, key, name, path in _leaves(saved["outer"], form.order):
        value = held[key]
        if isinstance(value, Tensor) and value.shape == form.parts[name].shape:
            held[key] = value.new_empty(0)
            if value.numel():
                params[name][path] = value.flatten()


def collect_outer(saved: Mapping[str, Any], form: OuterForm) -> None:
    """Puts what ``spread_outer`` has made fields back into the outer state."""
    params = saved["params"]
    for held, key, name, path in _leaves(saved["outer"], form.order):
        value = held[key]
        if isinstance(value, Tensor) and not value.numel():
            part = form.parts[name]
            row = params[name][path] if part.numel() else value
            held[key] = row.view(part.shape)
    for name, fields in params.items():
        params[name] = {
            path: fields[path] for path in fields if not path.startswith(_OUTER)
        }


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
