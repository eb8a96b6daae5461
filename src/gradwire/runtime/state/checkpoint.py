"""Saving and loading the state of exchanges, by parameter name and rank.

All that messages keep is rows: a row has a field of state, and the range of a
parameter that it is about. Checkpoints, residuals, moves to other messages and
newcomers are questions to these rows. Whatever has ``slots`` and their parts of a
``state`` has such rows, as a `Message` does. Residuals differ from rank to rank, so
every rank saves and loads its own state_dict, or one rank saves all ranks'.
``table`` says whose each entry of a state_dict is. For another number of ranks,
``redistribute`` makes new ones of all old ones.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import Exchange, State
from ...errors import InvalidSetting, log
from ...exchange.error_feedback import nested
from ...exchange.error_feedback import residuals as residuals_of
from ..step.messages import Message
from .table import (
    SCHEMA,
    Fields,
    Origin,
    check_form,
    check_layout,
    is_by_element,
    is_residual,
    refuse_values,
)

NOBODY = Origin()
"""The origin of a state that no rank loads, as it moves to other messages at once."""


def share_of(messages: Sequence[Message], ranks_per_host: int) -> str:
    """A text for the elements this rank keeps state for; empty with one rank a host.

    It depends on how parameters are cut. Only where tensors stay whole, it depends on
    the messages that they travel in too.
    """
    if ranks_per_host == 1:
        return ""
    return hashlib.sha256(repr(_kept_ranges(messages)).encode()).hexdigest()


def _kept_ranges(messages: Sequence[Message]) -> list[tuple[str, int, int]]:
    """The ranges of parameters, by name, that this rank keeps state of."""
    return sorted(
        (slot.name, *m.kept_range(slot)) for m in messages for slot in m.slots
    )


class KeptRow(NamedTuple):
    """A field of state, by its path, of elements ``first`` to ``last`` of a parameter.

    ``held`` is a view of these elements. A field that has no value for each element is
    of the whole range.
    """

    name: str
    path: str
    first: int
    last: int
    held: Tensor


def rows(message: Message, state: State = None) -> Iterator[KeptRow]:
    """All of ``state`` (None: the message's own) that is of one parameter."""
    for slot in message.slots:
        for path, tensor in message.state_of(slot, state).items():
            yield KeptRow(slot.name, path, *message.range_of(slot, tensor), tensor)


def shared_values(
    saved: Mapping[str, Any], exchanges: Iterable[Exchange]
) -> dict[str, str]:
    """The values in a state by which ranks decide alike, as text by name in errors.

    They are whole numbers, and the fields that an exchange ``decides_by``. A long one's
    is a digest.
    """
    parts = [part for exchange in exchanges for part in nested(exchange)]
    deciding = {name for part in parts for name in part.decides_by}
    texts = {}
    for key, of in (("params", ""), ("messages", "the message of ")):
        for name, fields in saved[key].items():
            for path, tensor in fields.items():
                decides = (
                    path.rpartition(".")[2] in deciding
                    or not tensor.is_floating_point()
                )
                if decides and not is_by_element(path):
                    texts[f"{path} of {of}{name}"] = _as_text(tensor)
    return texts


def _as_text(tensor: Tensor) -> str:
    text = str(tensor.tolist())
    return text if len(text) <= 80 else hashlib.sha256(text.encode()).hexdigest()


def collect(
    messages: Sequence[Message],
    origin: Origin = NOBODY,
    *,
    step: int = 0,
    run: str = "",
    undone: Collection[str] = (),
) -> dict[str, Any]:
    """The state_dict of one rank: plain tensors of host memory, numbers and strings.

    ``run`` is the same on all ranks that train together, and on no others. Parameters
    ``undone`` are as they were at their optimizer's last step.
    """
    numels = _numels(messages)
    params: dict[str, dict[str, Tensor]] = {name: {} for name in numels}
    whole = {}
    for message in messages:
        state = message.backup.without(undone)
        for name, path, first, last, tensor in rows(message, state):
            fields = params[name]
            if not is_by_element(path):
                fields[path] = tensor.to("cpu", copy=True)
                continue
            if path not in fields:
                fields[path] = torch.zeros(
                    numels[name], dtype=tensor.dtype, device="cpu"
                )
            fields[path][first:last] = tensor
        if rest := message.rest_of_state(state):
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


def residuals(messages: Sequence[Message]) -> dict[str, Tensor]:
    """The sum of each parameter's residuals, where it has any, by name."""
    tensors = {}
    numels = _numels(messages)
    for message in messages:
        for residual, slot in product(
            residuals_of(message.state).values(), message.slots
        ):
            part = message.part(slot, residual)
            if slot.name not in tensors:
                tensors[slot.name] = part.new_zeros(numels[slot.name])
            first, last = message.range_of(slot, part)
            tensors[slot.name][first:last] += part
    return tensors


def scale(
    saved: Mapping[str, Any],
    factor: float,
    which: Callable[[str], bool] = is_by_element,
) -> None:
    """Scales fields of a collected state, by default fields with a value an element."""
    for fields in saved["params"].values():
        for path in filter(which, fields):
            fields[path].copy_(fields[path] * factor)


def _numels(messages: Sequence[Message]) -> dict[str, int]:
    """The number of elements of each parameter.

    Each element is in exactly one message.
    """
    numels: dict[str, int] = {}
    for message in messages:
        for slot in message.slots:
            numels[slot.name] = numels.get(slot.name, 0) + slot.stop - slot.start
    return numels


def refuse_other(
    saved: Any, messages: Sequence[Message], origin: Origin, *, strict: bool
) -> None:
    """Raises ``InvalidSetting`` unless this rank made ``saved`` of these parameters.

    It may have other fields, and be of another share, as after a change of plans.
    """
    check_form(saved)
    check_origin(saved, origin)
    check_parameters(saved, messages, strict=strict)


def check_origin(saved: Mapping[str, Any], origin: Origin) -> None:
    """Raises ``InvalidSetting`` unless ``saved`` was made where ``origin`` says."""
    for key in ("world_size", "ranks_per_host", "rank", "shard", "algorithm"):
        there = saved[key]
        here = getattr(origin, key)
        if there != here:
            raise InvalidSetting(_refusal(key, there, here))


def _refusal(key: str, there: Any, here: Any) -> str:
    """The sentence for an entry of a state_dict that is another one than here."""
    redistribute = (
        "load a sharded_state() or what gather_state() returned, or the state_dicts of "
        "all old ranks: pass gw.redistribute(state_dicts, world_size"
    )
    on_hosts = f"{redistribute}, ranks_per_host)[rank] instead"
    match key:
        case "world_size":
            return (
                f"this state was saved by {there} ranks and there are {here} now; "
                f"{redistribute})[rank]"
            )
        case "ranks_per_host":
            return (
                f"this state was saved on hosts of {there} ranks and hosts have {here} "
                f"now; {on_hosts}"
            )
        case "share":
            return (
                "this state is of another share of the parameters, as a plan cut them "
                f"in another way; {on_hosts}"
            )
        case "rank":
            return (
                f"this state was saved by rank {there} and this is rank {here}; each "
                "rank loads its own, as residuals differ from rank to rank"
            )
        case "shard":
            return (
                f"this state is of {there} of every layer and this rank holds {here}; "
                "each rank loads its own, so save under a name that says the shard too"
            )
        case _:
            return (
                f"this state belongs to {there} and attached is {here}; attach with "
                "the same settings, or start without this state"
            )


def check_parameters(
    saved: Mapping[str, Any], messages: Sequence[Message], *, strict: bool
) -> None:
    """Compares the parameters of ``saved`` with the messages' parameters.

    Raises ``InvalidSetting`` where they differ; not ``strict``, it warns.
    """
    here = set(_numels(messages))
    there = set(saved["params"])
    missing = sorted(here - there)
    unknown = sorted(there - here)
    if not missing and not unknown:
        return
    if strict:
        raise InvalidSetting(
            f"state_dict and model differ: missing {missing or 'nothing'}, unexpected "
            f"{unknown or 'nothing'}; load the state of the same model, or pass "
            "strict=False"
        )
    log.warning("state not loaded for %s; state of %s dropped", missing, unknown)


def check_fields(
    saved: Mapping[str, Any], messages: Sequence[Message], *, strict: bool
) -> None:
    """Compares each parameter's fields in ``saved`` with a message's fields.

    Raises ``InvalidSetting`` where they differ; not ``strict``, it warns.
    """
    here = {name: set[str]() for name in _numels(messages)}
    for message in messages:
        for row in rows(message):
            here[row.name].add(row.path)
    # Fields of a tensor that another rank of the host has are checked there.
    kept = {name for name, first, last in _kept_ranges(messages) if first < last}
    for name in sorted(kept.intersection(saved["params"])):
        there = set(saved["params"][name])
        lost = sorted(there - here[name])
        absent = sorted(here[name] - there)
        if not lost and not absent:
            continue
        if strict:
            raise InvalidSetting(_fields_refusal(name, lost, absent))
        log.warning(
            "%s: state not loaded for %s; state of %s dropped", name, absent, lost
        )


def _fields_refusal(name: str, lost: Sequence[str], absent: Sequence[str]) -> str:
    remedy = "attach with the compress_if or the plan it was saved with"
    if lost:
        return (
            f"the state holds {', '.join(lost)} of {name}, which keeps no such state "
            f"any more; {remedy}"
        )
    return (
        f"the state lacks {', '.join(absent)} of {name}; {remedy}, or pass "
        "strict=False to begin without"
    )


def loaded(
    saved: Any, messages: Sequence[Message], origin: Origin, *, strict: bool = True
) -> list[State]:
    """The new state of every message, in order; present states are not touched.

    Raises ``InvalidSetting`` unless ``saved`` is a whole and sound state_dict that was
    made by this rank of this many ranks. With ``strict`` it must have each parameter of
    the model and each field of its state, and no others. Without ``strict``, fields
    that it lacks are as before the first step.
    """
    refuse_other(saved, messages, origin, strict=strict)
    if saved["share"] not in ("", origin.share):
        raise InvalidSetting(_refusal("share", saved["share"], origin.share))
    check_fields(saved, messages, strict=strict)
    params = saved["params"]
    whole = saved["messages"]
    numels = _numels(messages)
    # Another number of ranks cuts other chunks: the state of a chunk starts afresh.
    saved_by = saved["saved_by"], saved["saved_per_host"]
    is_whole = saved_by == (origin.world_size, origin.ranks_per_host)
    states = []
    for message in messages:
        state = _filled(message, params, whole, numels, is_whole=is_whole)
        if message.chooser is not None:
            message.chooser.check(state, [slot.name for slot in message.slots])
        states.append(state)
    if lost := sorted({*whole} - {message.key for message in messages}):
        log.warning(
            "gradients travel in other messages than where this state was saved "
            "(%s): what was "
            "kept of a whole message, such as the step of random numbers, starts anew",
            lost[0],
        )
    return states


class BegunStep(NamedTuple):
    """A step of parameters ``names`` that the scaler has not said to be taken or not.

    ``saved`` is the state as if it were skipped.
    """

    names: set[str]
    saved: Mapping[str, Any]


def begun_step(messages: Sequence[Message]) -> BegunStep:
    """The step that the scaler has not decided; it may be one of no parameters."""
    names = {name for message in messages for name in message.backup.undecided}
    return BegunStep(names, collect(messages, undone=names))


def move(
    saved: Mapping[str, Any],
    messages: Sequence[Message],
    begun: BegunStep | None = None,
) -> None:
    """Moves the state ``saved`` of old messages into the messages that replace them.

    Each field goes to the field of its path. A parameter's residuals are added up if
    its new exchange keeps them under another path. An exchange without residuals must
    not get any (see `messages_without_residuals`). All other fields that the new
    messages do not keep are dropped. The scaler may still skip the step that the old
    messages have ``begun``.
    """
    numels = _numels(messages)
    for message in messages:
        message.state = _moved(saved, message, numels)
        if begun is not None and not begun.names.isdisjoint(message.names):
            message.backup.go_on(_moved(begun.saved, message, numels), begun.names)


def _moved(
    saved: Mapping[str, Any], message: Message, numels: Mapping[str, int]
) -> State:
    """A new state of a message, with the values that ``saved`` has of its fields."""
    params = {
        slot.name: _with_residuals_moved(
            saved["params"].get(slot.name, {}), message.state_of(slot)
        )
        for slot in message.slots
    }
    return _filled(message, params, saved["messages"], numels, is_whole=False)


def messages_without_residuals(
    saved: Mapping[str, Any], messages: Sequence[Message]
) -> list[int]:
    """Places of messages without residuals, for whose parameters some were saved.

    It follows from the names of fields alone, and so is the same on all ranks.
    """
    owed = {
        name
        for name, fields in saved["params"].items()
        if any(map(is_residual, fields))
    }
    return [
        place
        for place, message in enumerate(messages)
        if owed & {*message.names} and not residuals_of(message.state)
    ]


def _with_residuals_moved(fields: Fields, own_fields: Fields) -> Fields:
    """One parameter's saved fields, residuals under the paths in ``own_fields``."""
    owed = [*filter(is_residual, fields)]
    homes = sorted(filter(is_residual, own_fields), key=len)
    if not homes or {*owed} <= {*homes}:
        return fields
    others = {path: tensor for path, tensor in fields.items() if path not in owed}
    residuals = torch.stack([fields[path] for path in owed])
    return {**others, homes[0]: residuals.sum(0)}


@torch.no_grad()
@torch.inference_mode(False)
def _filled(
    message: Message,
    params: Mapping[str, Fields],
    whole: Mapping[str, Fields],
    numels: Mapping[str, int],
    *,
    is_whole: bool,
) -> State:
    """A state of the message, filled with its own and its parameters' saved fields."""
    state = message.first_state()
    for name, path, first, last, tensor in rows(message, state):
        saved = params.get(name, {}).get(path)
        if saved is None:
            continue
        what = f"{path} of {name}"
        if is_by_element(path):
            check_layout(what, saved, (numels[name],), tensor.dtype)
            saved = saved[first:last]
        _fill(what, tensor, saved)
    if (rest := whole.get(message.key)) is None:
        return state
    own_rest = message.rest_of_state(state)
    if is_whole and (odd := set(rest) ^ set(own_rest)):
        raise InvalidSetting(
            f"the state of the message of {message.key} has other fields: only one of "
            f"the saved and the attached state has {', '.join(sorted(odd))}; load the "
            "state of the same model and exchange"
        )
    for path, tensor in own_rest.items():
        if is_whole or (path in rest and rest[path].shape == tensor.shape):
            _fill(f"{path} of the message of {message.key}", tensor, rest[path])
    return state


def _fill(what: str, tensor: Tensor, saved: Tensor) -> None:
    """Copies a saved tensor into a state.

    Raises for another shape, dtype or impossible values.
    """
    check_layout(what, saved, tensor.shape, tensor.dtype)
    values = saved.detach().cpu()
    refuse_values(what, values, tensor)
    tensor.copy_(values)
