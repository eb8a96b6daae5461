"""Saving and loading the state of exchanges, by parameter name and rank.

Residuals differ from rank to rank, so every rank saves and loads a state_dict of its own, or one
rank saves those of all. For another number of ranks, ``redistribute`` makes new ones of all old
ones.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import State
from ...errors import InvalidSetting, invalid
from ...exchange.error_feedback import chooser_of, residuals
from ..step.messages import Message
from .saved import SCHEMA, Fields, check_form, refuse_values

_log = logging.getLogger("gradwire")


class Origin(NamedTuple):
    """The owner of a state: its exchange, the number of ranks, and the rank that keeps it.

    ``shard`` says which part of every layer the rank holds, where layers are cut. ``share`` says
    for which elements it keeps state, where hosts have several ranks, and is empty for all.
    """

    algorithm: str
    world_size: int
    rank: int
    shard: str
    ranks_per_host: int = 1
    share: str = ""


def share_of(messages: Sequence[Message], ranks_per_host: int) -> str:
    """A text for the elements that this rank keeps state for; empty where hosts have one rank.

    It depends on how parameters are cut, and not on the messages that they travel in.
    """
    if ranks_per_host == 1:
        return ""
    kept = sorted((slot.name, *m.kept_range(slot)) for m in messages for slot in m.slots)
    return hashlib.sha256(repr(kept).encode()).hexdigest()


def collect(
    messages: Sequence[Message], origin: Origin, *, step: int = 0, run: str = ""
) -> dict[str, Any]:
    """The state_dict of one rank: plain tensors of host memory, numbers and strings.

    ``run`` is the same on all ranks that train together, and on no others.
    """
    numels = _numels(messages)
    params: dict[str, dict[str, Tensor]] = {name: {} for name in numels}
    whole: dict[str, dict[str, Tensor]] = {}
    for message in messages:
        for slot in message.slots:
            fields = params[slot.name]
            for path, kept in message.own_state(slot).items():
                own = kept.cpu()
                if path.endswith("_T"):
                    fields[path] = own
                    continue
                if path not in fields:
                    fields[path] = own.new_zeros(numels[slot.name])
                first, last = message.range_of(slot, own)
                fields[path][first:last] = own
        if rest := message.rest_of_state():
            whole[message.key] = {
                path: tensor.to("cpu", copy=True) for path, tensor in rest.items()
            }
    return {
        "version": SCHEMA,
        **origin._asdict(),
        "saved_by": origin.world_size,
        "saved_per_host": origin.ranks_per_host,
        "run": run,
        "step": step,
        "params": params,
        "messages": whole,
    }


def _numels(messages: Sequence[Message]) -> dict[str, int]:
    """The number of elements of each parameter; each element is in exactly one message."""
    numels: dict[str, int] = {}
    for message in messages:
        for slot in message.slots:
            numels[slot.name] = numels.get(slot.name, 0) + slot.stop - slot.start
    return numels


def refuse_other(saved: Any, messages: Sequence[Message], origin: Origin, *, strict: bool) -> None:
    """Raises ``InvalidSetting`` unless ``saved`` was made by this rank, of these parameters.

    Their fields may be others, and of other shares, for whoever moves them.
    """
    check_form(saved)
    _check_origin(saved, origin._replace(share=saved["share"]))
    _compare_names(saved["params"], set(_numels(messages)), strict)


def loaded(
    saved: Any, messages: Sequence[Message], origin: Origin, *, strict: bool = True
) -> list[State]:
    """The new state of every message, in their order; their present states are not touched.

    Raises ``InvalidSetting`` unless ``saved`` is a whole and sound state_dict that was made by this
    rank of this many ranks. With ``strict`` it must have each parameter of the model and each field
    of its state, and no others. Without ``strict``, fields that it lacks are as before the first
    step.
    """
    check_form(saved)
    _check_origin(saved, origin)
    numels, known = _numels(messages), _paths(messages)
    _check_names(saved["params"], known, strict)
    # Another number of ranks cuts other chunks: what is kept of a chunk starts afresh.
    saved_by = saved["saved_by"], saved["saved_per_host"]
    is_whole = saved_by == (origin.world_size, origin.ranks_per_host)
    with torch.no_grad(), torch.inference_mode(False):
        states = [
            _filled(message, saved["params"], numels, saved["messages"], is_whole=is_whole)
            for message in messages
        ]
    for message, state in zip(messages, states, strict=True):
        own = chooser_of(message.exchange)
        if own is not None:
            own.check(state, [slot.name for slot in message.slots])
    keys = {message.key for message in messages}
    if lost := [key for key in saved["messages"] if key not in keys]:
        _log.warning(
            "gradients travel in other messages than where this state was saved (%s): what was "
            "kept of a whole message, such as the step of random numbers, starts afresh",
            lost[0],
        )
    return states


def moved(saved: Mapping[str, Any], messages: Sequence[Message]) -> list[State]:
    """The states of messages that go on where others, of which ``saved`` was collected, have ended.

    Each field goes to the field of its path. A parameter's residuals are added up where its new
    exchange keeps them under another path; one that keeps none must not have been given any (see
    `homeless`). What else the new messages do not keep ends here.
    """
    numels, states = _numels(messages), []
    with torch.no_grad(), torch.inference_mode(False):
        for message in messages:
            fields = {
                slot.name: _housed(saved["params"].get(slot.name, {}), message.state_of(slot))
                for slot in message.slots
            }
            states.append(_filled(message, fields, numels, saved["messages"], is_whole=False))
    return states


def homeless(saved: Mapping[str, Any], messages: Sequence[Message]) -> list[int]:
    """Places of the messages that keep no residuals, of parameters for which some were saved.

    It follows from the names of fields alone, and so is the same on all ranks.
    """
    owed = {name for name, fields in saved["params"].items() if any(map(is_residual, fields))}
    return [
        place
        for place, message in enumerate(messages)
        if owed & {*message.names} and not residuals(message.state)
    ]


def _housed(fields: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One parameter's saved fields, the residuals under paths that its new state ``own`` has."""
    saved, kept = filter(is_residual, fields), sorted(filter(is_residual, own), key=len)
    paths = [*saved]
    if not kept or {*paths} <= {*kept}:
        return dict(fields)
    others = {path: tensor for path, tensor in fields.items() if path not in paths}
    return {**others, kept[0]: torch.stack([fields[path] for path in paths]).sum(0)}


def is_residual(path: str) -> bool:
    """Whether a field of saved state is gradient that the mean does not hold yet."""
    return path.rpartition(".")[2].startswith("residual")


_ON_HOSTS = (
    "load what handle.gather_state() returned, or the state_dicts of all old ranks and pass "
    "gw.redistribute(state_dicts, world_size, ranks_per_host)[rank] instead"
)


def _check_origin(saved: Mapping[str, Any], origin: Origin) -> None:
    if saved["world_size"] != origin.world_size:
        raise InvalidSetting(
            f"this state was saved by {saved['world_size']} ranks and there are "
            f"{origin.world_size} now; load what handle.gather_state() returned, or the "
            "state_dicts of all old ranks and pass gw.redistribute(state_dicts, world_size)[rank]"
        )
    if saved["ranks_per_host"] != origin.ranks_per_host:
        raise InvalidSetting(
            f"this state was saved on hosts of {saved['ranks_per_host']} ranks and hosts have "
            f"{origin.ranks_per_host} now; {_ON_HOSTS}"
        )
    if saved["share"] not in ("", origin.share):
        raise InvalidSetting(
            "this state is of another share of the parameters, as a plan cut them in another way; "
            f"{_ON_HOSTS}"
        )
    if saved["rank"] != origin.rank:
        raise InvalidSetting(
            f"this state was saved by rank {saved['rank']} and this is rank {origin.rank}; each "
            "rank loads its own, as residuals differ from rank to rank"
        )
    if saved["shard"] != origin.shard:
        raise InvalidSetting(
            f"this state is of {saved['shard']} of every layer and this rank holds "
            f"{origin.shard}; each rank loads its own, so save under a name that says the shard too"
        )
    if saved["algorithm"] != origin.algorithm:
        raise InvalidSetting(
            f"this state belongs to {saved['algorithm']} and attached is {origin.algorithm}; "
            "attach with the same settings, or start without this state"
        )


def _paths(messages: Sequence[Message]) -> dict[str, set[str]]:
    """The names of the fields of state that each parameter has."""
    known: dict[str, set[str]] = {}
    for message in messages:
        for slot in message.slots:
            known.setdefault(slot.name, set()).update(message.state_of(slot))
    return known


def _check_names(params: Fields, known: Mapping[str, set[str]], strict: bool) -> None:
    _compare_names(params, set(known), strict)
    for name in sorted(set(known) & set(params)):
        lost, absent = (
            sorted(set(params[name]) - known[name]),
            sorted(known[name] - set(params[name])),
        )
        if strict and lost:
            raise InvalidSetting(
                f"the state holds {', '.join(lost)} of {name}, which keeps no such state any more; "
                "attach with the compress_if or the plan it was saved with"
            )
        if strict and absent:
            raise InvalidSetting(
                f"the state lacks {', '.join(absent)} of {name}; attach with the compress_if or "
                "the plan it was saved with, or pass strict=False to begin without"
            )
        if lost or absent:
            _log.warning("%s: state not loaded for %s; state of %s dropped", name, absent, lost)


def _compare_names(params: Fields, known: set[str], strict: bool) -> None:
    missing, unknown = sorted(known - set(params)), sorted(set(params) - known)
    if strict and (missing or unknown):
        raise InvalidSetting(
            f"state_dict and model differ: missing {missing or 'nothing'}, unexpected "
            f"{unknown or 'nothing'}; load the state of the same model, or pass strict=False"
        )
    if missing or unknown:
        _log.warning("state not loaded for %s; state of %s dropped", missing, unknown)


def _filled(
    message: Message, params: Fields, numels: Mapping[str, int], whole: Fields, *, is_whole: bool
) -> State:
    """A state of the message, filled with the saved fields of its parameters and its own."""
    state = message.first_state()
    for slot in message.slots:
        saved = params.get(slot.name, {})
        for path, own in message.state_of(slot, state).items():
            if path not in saved:
                continue
            given, what = saved[path], f"{path} of {slot.name}"
            if path.endswith("_N"):
                _check_shape(what, given, (numels[slot.name],))
                first, last = message.range_of(slot, own)
                given = given[first:last]
            _fill(what, own, given)
    if (rest := whole.get(message.key)) is None:
        return state
    own_rest = message.rest_of_state(state)
    if is_whole and (odd := set(rest) ^ set(own_rest)):
        raise InvalidSetting(
            f"the state of the message of {message.key} has other fields: only one of the saved "
            f"and the attached state has {', '.join(sorted(odd))}; load the state of the same "
            "model and exchange"
        )
    for path, own in own_rest.items():
        if is_whole or (path in rest and rest[path].shape == own.shape):
            _fill(f"{path} of the message of {message.key}", own, rest[path])
    return state


def _fill(what: str, own: Tensor, given: Tensor) -> None:
    """Copies a saved tensor into a state; raises for another shape, dtype or impossible values."""
    _check_shape(what, given, tuple(own.shape))
    if given.dtype != own.dtype:
        remedy = "load the state of a model of the same dtypes"
        raise invalid(f"dtype of {what}", given.dtype, str(own.dtype), remedy)
    values = given.detach().cpu()
    refuse_values(what, values, own)
    own.copy_(values)


def _check_shape(what: str, given: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(given.shape) != shape:
        raise InvalidSetting(
            f"{what} has the shape {list(given.shape)} and here it has {list(shape)}; load the "
            "state of the same model and exchange"
        )
