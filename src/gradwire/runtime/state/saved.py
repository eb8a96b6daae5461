"""The form of a state_dict, which is checked before any value in it is used."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ...contract import MOST_COUNTED
from ...errors import InvalidSetting, invalid

SCHEMA = 3
Fields = Mapping[str, Tensor]
"""The tensors of one parameter's or message's state, by their path in it."""

_REMEDY = "pass what handle.state_dict() returned"
_COUNTS = ("world_size", "ranks_per_host", "saved_by", "saved_per_host")
_LEAST = dict.fromkeys(_COUNTS, 1) | {"rank": 0, "step": 0}
"""The numbers of a state_dict by name, each with the least value that is accepted."""
_MOST = 2**63 - 1
_TEXTS = ("algorithm", "shard", "share", "run")
_FIELDS = ("params", "messages")


def check_form(saved: Any, whose: str = "state_dict") -> None:
    """Raises ``InvalidSetting`` unless ``saved`` has the keys and the types of a state_dict.

    ``whose`` is its name in errors. Shapes and values are not checked here.
    """
    if not isinstance(saved, dict):
        raise invalid(whose, type(saved).__name__, "a dict", _REMEDY)
    version = saved.get("version", SCHEMA)
    if type(version) is not int or version != SCHEMA:
        raise invalid(f"{whose} version", _shown(version), str(SCHEMA), "save it with this version")
    if missing := {"version", *_LEAST, *_TEXTS, *_FIELDS} - set(saved):
        raise InvalidSetting(
            f"{whose} is not a gradwire state_dict: it lacks {', '.join(sorted(missing))}; pass "
            "what handle.state_dict() returned on this rank"
        )
    for key, least in _LEAST.items():
        given = saved[key]
        if type(given) is not int or not least <= given <= _MOST:
            accepted = f"a whole number from {least} to 2**63 - 1"
            raise invalid(f"{key} of {whose}", _shown(given), accepted, _REMEDY)
    for key in _TEXTS:
        if type(saved[key]) is not str:
            raise invalid(f"{key} of {whose}", _shown(saved[key]), "a text", _REMEDY)
    for key in _FIELDS:
        given = saved[key]
        trees = [given, *given.values()] if isinstance(given, dict) else [None]
        if not all(isinstance(tree, dict) and all(type(k) is str for k in tree) for tree in trees):
            accepted = "a dict of dicts of tensors, by texts"
            raise invalid(f"{key} of {whose}", _shown(given), accepted, _REMEDY)
        for name, path, value in ((n, p, v) for n, own in given.items() for p, v in own.items()):
            if (kind := _unfit(value)) is not None:
                what, accepted = f"{path} of {name} in {key} of {whose}", "a plain, dense tensor"
                raise invalid(what, kind, f"{accepted} with values", _REMEDY)


def _unfit(value: Any) -> str | None:
    """The reason, in words, why a value cannot be a tensor of the state; None if it can."""
    if type(value) not in (Tensor, nn.Parameter):
        return f"{_shown(value)}"
    if value.layout is not torch.strided or value.is_nested:
        return f"one of layout {value.layout}"
    if value.is_meta or value.is_quantized:
        return f"one of {value.dtype} on {value.device}"
    return None


def _shown(given: Any) -> Any:
    """A value as errors show it: itself if it is a plain and short one, else its type's name."""
    is_plain = given is None or isinstance(given, bool | int | float | str)
    return given if is_plain and len(repr(given)) <= 80 else type(given).__name__


def refuse_values(what: str, given: Tensor, fresh: Tensor | None = None) -> None:
    """Raises where a tensor holds values that ``contract.State`` does not allow.

    They are allowed where ``fresh``, the tensor that training begins with, holds such values too.
    """
    wrong = _strange(given)
    if not bool(wrong.any()) or (fresh is not None and bool(_strange(fresh).any())):
        return
    accepted = "finite" if given.is_floating_point() else f"0 to {MOST_COUNTED}"
    remedy = "load an older checkpoint, as this one is damaged"
    raise invalid(what, given[wrong][0].item(), accepted, remedy)


def copied(old: Any) -> Any:
    """A copy of a state_dict, or of a part of one, in host memory."""
    if isinstance(old, dict):
        return {key: copied(value) for key, value in old.items()}
    return old.detach().cpu().clone() if isinstance(old, Tensor) else deepcopy(old)


_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of fields that can be shared out: a new rank's field is a scaled sum of old ones."""


def summed(what: str, like: Tensor, held: Mapping[int, Tensor], factor: float) -> Tensor:
    """``factor`` times the sum of what each rank has held, a tensor of the form of ``like``.

    Raises where a rank's is damaged, or is not to be added up. One alone, times 1, is itself.
    """
    is_alone = len(held) == factor == 1
    if like.dtype not in _SUMMED and (like.is_floating_point() or not is_alone):
        remedy = "go on with as many ranks as saved it"
        raise invalid(f"dtype of {what}", like.dtype, "a floating-point one", remedy)
    parts = {rank: part.detach().cpu() for rank, part in held.items()}
    for rank, part in parts.items():
        refuse_values(f"{what} of rank {rank}", part)
    if is_alone:
        return next(iter(parts.values())).clone()
    total = torch.zeros_like(like, device="cpu")
    for part in parts.values():
        total.add_(part, alpha=factor)
    refuse_values(f"{what}, shared out among other ranks,", total)
    return total


def _strange(given: Tensor) -> Tensor:
    if given.is_floating_point() or given.is_complex():
        return ~given.isfinite()
    counts = given.long()
    return (counts < 0) | (counts > MOST_COUNTED)
