"""The table of a state_dict: the owner of each entry, and how it moves to other ranks.

All ways to save read it: a file for each rank, one file for all ranks, and shards for
``torch.distributed.checkpoint``. The comparison of ranks' states before a joint load
reads it, too.

The entries of an `Origin` say where a state was saved; a rank that loads sets its own.
``ENTRIES`` says which of all entries ranks have in common. A tensor's path decides how
it moves to other ranks:

* A path that ends with ``_N``, for example a residual: it has a value for each element
  of a parameter, and each rank has its own. A new rank gets the sum of some old ranks'
  tensors, times the new over the old number of ranks.
* Any other field of a parameter: it is the same on all ranks of a share, and is copied.
* A field of a whole message: it is copied if the new message is as long.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...contract import MOST_COUNTED
from ...contract.bounds import check_whole
from ...errors import InvalidSetting, invalid

SCHEMA = 3
Fields = Mapping[str, Tensor]
"""The tensors of one parameter's or message's state, by their path in it."""
MOST_STEPS = 2**62
"""The most that a state_dict's number may be: steps travel as 64 bits, and count on."""
_REMEDY = "pass what handle.state_dict() returned"
_FIELDS = ("params", "messages")


class Entry(NamedTuple):
    """An entry of a state_dict that is a number or a string.

    ``least`` is the least number that is accepted; None stands for a string.
    ``is_shared`` says whether all ranks that save together have the same value.
    """

    least: int | None
    is_shared: bool = True


ENTRIES = {
    "algorithm": Entry(None),
    "world_size": Entry(1),
    "rank": Entry(0, is_shared=False),
    "shard": Entry(None, is_shared=False),
    "ranks_per_host": Entry(1),
    "share": Entry(None, is_shared=False),
    "saved_by": Entry(1),
    "saved_per_host": Entry(1),
    "step": Entry(0),
    "run": Entry(None),
}
"""The entries of every state_dict, except its version and its messages' state."""


class Origin(NamedTuple):
    """The owner of a state: its exchange, the number of ranks, and the keeping rank.

    ``shard`` says which part of every layer the rank holds, if layers are cut.
    ``share`` says for which elements the rank keeps state, if hosts have several ranks.
    It is empty for all elements.
    """

    algorithm: str = ""
    world_size: int = 1
    rank: int = 0
    shard: str = ""
    ranks_per_host: int = 1
    share: str = ""


def is_by_element(path: str) -> bool:
    """Whether a field of saved state has a value for each element of its parameter."""
    return path.endswith("_N")


def fields_of(
    params: Mapping[str, Fields], *, by_element: bool
) -> dict[str, dict[str, Tensor]]:
    """Each parameter's fields with a value for each element, or all other fields."""
    return {
        name: {
            path: tensor
            for path, tensor in fields.items()
            if is_by_element(path) is by_element
        }
        for name, fields in params.items()
    }


def described(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that ranks' states must have in common, by their names in errors.

    A field of a parameter comes with its shape and dtype. A state of a share lists only
    fields with a value for each element: one rank of a host alone has the other fields
    of a tensor that is not cut.
    """
    description: dict[str, Any] = {"is of a share": saved["share"] != ""}
    description |= {
        key: saved[key] for key, entry in ENTRIES.items() if entry.is_shared
    }
    description["local_step"] = saved.get("local_step")
    for name, fields in saved["params"].items():
        description[f"the parameter {name}"] = "there"
        for path, tensor in fields.items():
            if is_by_element(path) or not saved["share"]:
                description[f"{path} of {name}"] = (
                    f"{list(tensor.shape)} {tensor.dtype}"
                )
    for name, fields in saved["messages"].items():
        description[f"the message of {name}"] = sorted(fields)
    return description


def is_residual(path: str) -> bool:
    """Whether a field of saved state holds parts of gradients that were not sent."""
    return path.rpartition(".")[2].startswith("residual")


def check_form(saved: Any, whose: str = "state_dict") -> None:
    """Raises ``InvalidSetting`` unless ``saved`` has a state_dict's keys and types.

    ``whose`` is its name in errors. Shapes and values are not checked here.
    """
    if not isinstance(saved, dict):
        raise invalid(whose, type(saved).__name__, "a dict", _REMEDY)
    version = saved.get("version", SCHEMA)
    if type(version) is not int or version != SCHEMA:
        raise invalid(
            f"{whose} version",
            version,
            str(SCHEMA),
            "save it with this version",
        )
    if missing := {"version", *ENTRIES, *_FIELDS} - set(saved):
        raise InvalidSetting(
            f"{whose} is not a gradwire state_dict: it lacks "
            f"{', '.join(sorted(missing))}; {_REMEDY} on this rank"
        )
    for key, entry in ENTRIES.items():
        what = f"{key} of {whose}"
        if entry.least is not None:
            check_whole(what, saved[key], _REMEDY, least=entry.least, most=MOST_STEPS)
        elif type(saved[key]) is not str:
            raise invalid(what, saved[key], "a text", _REMEDY)
    for key in _FIELDS:
        _check_fields_form(saved[key], f"{key} of {whose}")


def _check_fields_form(state: Any, whose: str) -> None:
    """Raises ``InvalidSetting`` unless ``state`` has dicts of tensors, by strings."""
    if not is_tree(state):
        raise invalid(
            whose, type(state).__name__, "a dict of dicts of tensors, by texts", _REMEDY
        )
    for name, fields in state.items():
        for path, value in fields.items():
            if (kind := _unfit(value)) is not None:
                raise invalid(
                    f"{path} of {name} in {whose}",
                    kind,
                    "a plain, dense tensor with values",
                    _REMEDY,
                )


def is_tree(value: Any) -> bool:
    """Whether a value is a dict of dicts, all by strings."""
    return _is_by_text(value) and all(map(_is_by_text, value.values()))


def _is_by_text(value: Any) -> bool:
    """Whether a value is a dict whose keys are strings."""
    return isinstance(value, dict) and all(type(key) is str for key in value)


def _unfit(value: Any) -> str | None:
    """The reason, in words, why a value cannot be a state's tensor; None if it can."""
    if type(value) not in (Tensor, nn.Parameter):
        return type(value).__name__
    if value.layout is not torch.strided or value.is_nested:
        return f"one of layout {value.layout}"
    if value.is_meta or value.is_quantized:
        return f"one of {value.dtype} on {value.device}"
    return None


def check_layout(
    what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raises ``InvalidSetting`` where a tensor has another shape or dtype than here."""
    if tuple(tensor.shape) != tuple(shape):
        raise InvalidSetting(
            f"{what} has the shape {list(tensor.shape)} and here it has "
            f"{list(shape)}; load the state of the same model and exchange"
        )
    if tensor.dtype != dtype:
        raise invalid(
            f"dtype of {what}",
            tensor.dtype,
            str(dtype),
            "load the state of a model of the same dtypes, with the same outer_dtype",
        )


def refuse_values(what: str, tensor: Tensor, fresh: Tensor | None = None) -> None:
    """Raises where a tensor holds values that ``contract.State`` does not allow.

    They are allowed where ``fresh``, the tensor that training begins with, holds such
    values too.
    """
    wrong = _strange(tensor)
    is_usual = fresh is not None and bool(_strange(fresh).any())
    if is_usual or not wrong.any():
        return
    accepted = "finite" if tensor.is_floating_point() else f"0 to {MOST_COUNTED}"
    raise invalid(
        what,
        tensor[wrong][0].item(),
        accepted,
        "load an older checkpoint, as this one is damaged",
    )


def copied(old: Any) -> Any:
    """A copy of a state_dict, or of a part of one, in host memory."""
    return tree_map(
        lambda leaf: (
            leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else deepcopy(leaf)
        ),
        old,
    )


_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of fields that can be shared out: a new rank gets a scaled sum of old ones."""


def summed(
    what: str, like: Tensor, values: Mapping[int, Tensor], factor: float
) -> Tensor:
    """``factor`` times the sum of each rank's tensor, in the form of ``like``.

    Raises if a rank's tensor is damaged or cannot be added up. A single tensor, times
    1, is only copied.
    """
    is_alone = len(values) == factor == 1
    if like.dtype not in _SUMMED and (like.is_floating_point() or not is_alone):
        raise invalid(
            f"dtype of {what}",
            like.dtype,
            "a floating-point one",
            "go on with as many ranks as saved it",
        )
    parts = {rank: part.detach().cpu() for rank, part in values.items()}
    for rank, part in parts.items():
        refuse_values(f"{what} of rank {rank}", part)
    if is_alone:
        return next(iter(parts.values())).clone()
    total = torch.zeros_like(like, device="cpu")
    for part in parts.values():
        total.add_(part, alpha=factor)
    refuse_values(f"{what}, shared out among other ranks,", total)
    return total


def _strange(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return ~tensor.isfinite()
    counts = tensor.long()
    return (counts < 0) | (counts > MOST_COUNTED)
