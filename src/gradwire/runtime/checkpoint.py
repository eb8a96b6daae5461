"""Saving and loading what exchanges keep between steps, by parameter name and rank.

A rank's residual is its own: every rank saves and loads its own state_dict. For another number of
ranks, ``redistribute`` makes new ones from all the old ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import InvalidSetting, invalid
from .messages import Message, field_of, leaves

SCHEMA = 1
_log = logging.getLogger("gradwire")


def collect(
    messages: Sequence[Message], *, algorithm: str, rank: int, world: int, shard: str, step: int
) -> dict[str, Any]:
    """The state_dict of one rank: plain tensors, numbers and strings.

    ``shard`` says which part of every layer the rank holds, where layers are cut.
    """
    numels = _numels(messages)
    params: dict[str, dict[str, Tensor]] = {name: {} for name in numels}
    whole: dict[str, dict[str, Tensor]] = {}
    for message in messages:
        for slot in message.slots:
            fields = params[slot.name]
            for path, own in message.own_state(slot).items():
                if path.endswith("_T"):
                    fields[path] = own
                    continue
                if path not in fields:
                    fields[path] = own.new_zeros(numels[slot.name])
                fields[path][slot.first : slot.last] = own
        if rest := message.rest_of_state():
            whole[_key(message)] = rest
    return {
        "version": SCHEMA,
        "algorithm": algorithm,
        "world_size": world,
        "rank": rank,
        "shard": shard,
        "step": step,
        "params": params,
        "messages": whole,
    }


def _key(message: Message) -> str:
    return ",".join(str(slot) for slot in message.slots)


def _numels(messages: Sequence[Message]) -> dict[str, int]:
    """Elements of each parameter, of which every one is in exactly one message."""
    numels: dict[str, int] = {}
    for message in messages:
        for slot in message.slots:
            numels[slot.name] = numels.get(slot.name, 0) + slot.stop - slot.start
    return numels


_KEYS = {"version", "algorithm", "world_size", "rank", "shard", "step", "params"}


def _refuse_what_is_no_state(saved: Any) -> None:
    if not isinstance(saved, dict):
        kind = type(saved).__name__
        raise invalid("state_dict", kind, "a dict", "pass what handle.state_dict() returned")
    if missing := _KEYS - set(saved):
        raise InvalidSetting(
            f"not a gradwire state_dict: it lacks {', '.join(sorted(missing))}; pass what "
            "handle.state_dict() returned on this rank"
        )


def check(saved: dict[str, Any], *, algorithm: str, rank: int, world: int, shard: str) -> None:
    """Raises ``InvalidSetting`` unless ``saved`` was made by this rank of this many ranks."""
    _refuse_what_is_no_state(saved)
    if saved["version"] != SCHEMA:
        raise invalid(
            "state_dict version", saved["version"], str(SCHEMA), "save it with this version"
        )
    if saved["world_size"] != world:
        raise InvalidSetting(
            f"this state was saved by {saved['world_size']} ranks and there are {world} now; load "
            "the state_dicts of all old ranks and pass "
            "gw.redistribute(state_dicts, world_size)[rank] instead"
        )
    if saved["rank"] != rank:
        raise InvalidSetting(
            f"this state was saved by rank {saved['rank']} and this is rank {rank}; each rank "
            "loads its own, as residuals differ from rank to rank"
        )
    if saved["shard"] != shard:
        raise InvalidSetting(
            f"this state is of {saved['shard']} of every layer and this rank holds {shard}; each "
            "rank loads its own, so save under a name that says the shard too"
        )
    if saved["algorithm"] != algorithm:
        raise InvalidSetting(
            f"this state belongs to {saved['algorithm']} and attached is {algorithm}; attach with "
            "the same settings, or start without this state"
        )


def distribute(saved: dict[str, Any], messages: Sequence[Message], *, strict: bool = True) -> None:
    """Fills the messages' states; with ``strict`` parameter names must match exactly."""
    params: dict[str, dict[str, Tensor]] = saved["params"]
    numels = _numels(messages)
    missing, unknown = sorted(set(numels) - set(params)), sorted(set(params) - set(numels))
    if strict and (missing or unknown):
        raise InvalidSetting(
            f"state_dict and model differ: missing {missing or 'nothing'}, unexpected "
            f"{unknown or 'nothing'}; load the state of the same model, or pass strict=False"
        )
    if missing or unknown:
        _log.warning("state not loaded for %s; state of %s dropped", missing, unknown)
    for name, numel in numels.items():
        for path, tensor in params.get(name, {}).items():
            if path.endswith("_N") and tensor.numel() != numel:
                raise InvalidSetting(
                    f"{path} of {name} has {tensor.numel()} elements and the parameter {numel}; "
                    "load the state of the same model"
                )
    _refuse_other_shapes(params, messages)
    if strict:
        _refuse_lost_fields(params, messages)
    for message in messages:
        message.restore(params, saved.get("messages", {}).get(_key(message), {}))


def _refuse_other_shapes(params: dict[str, dict[str, Tensor]], messages: Sequence[Message]) -> None:
    """Before any state is written: what is kept for a whole parameter follows from its shape."""
    for message in messages:
        for slot in message.slots:
            saved = params.get(slot.name, {})
            for path, own in message.state_of(slot).items():
                if path.endswith("_T") and path in saved and saved[path].shape != own.shape:
                    raise InvalidSetting(
                        f"{path} of {slot.name} has the shape {list(saved[path].shape)} and here "
                        f"it has {list(own.shape)}; load the state of the same model and exchange"
                    )


def _refuse_lost_fields(params: dict[str, dict[str, Tensor]], messages: Sequence[Message]) -> None:
    known: dict[str, set[str]] = {}
    for message in messages:
        paths = {field_of(path) for path, _ in leaves(message.state)}
        for name in message.names:
            known.setdefault(name, set()).update(paths)
    for name, paths in known.items():
        if lost := set(params.get(name, {})) - paths:
            raise InvalidSetting(
                f"the state holds {', '.join(sorted(lost))} of {name}, which is not compressed "
                "any more; attach with the compress_if or the plan it was saved with"
            )


def redistribute(state_dicts: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """State for ``world_size`` ranks from the state_dicts of all old ranks.

    What was not delivered yet is kept: old rank j's residuals go to new rank j mod world_size,
    scaled by new / old world size, because a mean over W ranks delivers 1/W of a residual. So is
    velocity, and all that is kept for each element: its mean over ranks is what it was. State
    that is not per element is taken from the old rank of the same number (modulo), or starts afresh
    where it has another length among the new ranks.
    """
    if world_size < 1:
        raise invalid("world_size", world_size, "at least 1", "pass the new number of ranks")
    for state_dict in state_dicts:
        _refuse_what_is_no_state(state_dict)
    shards = sorted({state_dict["shard"] for state_dict in state_dicts})
    if len(shards) > 1:
        accepted = "those of ranks that hold the same part of every layer"
        raise invalid("state_dicts", shards, accepted, "redistribute each part's by itself")
    olds = sorted(state_dicts, key=lambda s: int(s["rank"]))
    count = olds[0]["world_size"] if olds else 1
    if [s["rank"] for s in olds] != list(range(count)):
        raise InvalidSetting(
            f"redistribute needs the state_dicts of all {count} old ranks, got those of ranks "
            f"{[s['rank'] for s in olds]}; load every rank's file"
        )
    scale = world_size / count
    return [_merged(olds, rank, world_size, scale) for rank in range(world_size)]


def _merged(
    olds: Sequence[dict[str, Any]], rank: int, world_size: int, scale: float
) -> dict[str, Any]:
    mine = [old for old in olds if old["rank"] % world_size == rank]
    template = olds[rank % len(olds)]
    params: dict[str, dict[str, Tensor]] = {}
    for name, fields in template["params"].items():
        params[name] = {}
        for path, like in fields.items():
            if path.endswith("_T"):
                params[name][path] = like.clone()
                continue
            total = like.new_zeros(like.shape)
            for old in mine:
                total.add_(old["params"][name][path], alpha=scale)
            params[name][path] = total
    return {**template, "rank": rank, "world_size": world_size, "params": params}
