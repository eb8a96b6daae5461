"""check: does a plan carry every element of every gradient exactly once, and can it be carried out?

A sound plan may be slow: an order whose first message waits for the last gradient of the backward
pass overlaps nothing, but it can be carried out, so it is no error. ``gradwire plan --explain``
says what it costs.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from ..errors import InvalidSetting
from .data.plan import DENSE, Chunk, Plan, PlannedMessage
from .data.profile import Profile, ProfiledTensor

_Range = tuple[int, int, int]
"""A range of a tensor: its first element, the one behind its last, and its message's number."""


def check(plan: Plan, profile: Profile) -> None:
    """Returns if ``plan`` is sound for ``profile``; messages are numbered from 0 in errors.

    Raises ``InvalidSetting`` that names the first fault found: a plan of another model, a credit
    below 1, an unknown exchange or tensor, an empty message, a range outside its tensor, mixed
    dtypes in one message, an encode that its exchange cannot do where it is to be done, a cyclic
    dependency, an order that cannot be met, doubled or lost
    elements.
    """
    if plan.model != profile.model:
        raise _fault(
            plan, f"made for model {plan.model!r}, and the profile is of {profile.model!r}"
        )
    if plan.credit < 1:
        raise _fault(plan, f"credit {plan.credit} lets no message start; 1 or more is accepted")
    if DENSE in plan.exchanges:
        raise _fault(plan, f"exchange {DENSE!r} is built in and cannot be defined again")
    tensors = {tensor.name: tensor for layer in profile.layers for tensor in layer.tensors}
    ranges: dict[str, list[_Range]] = {name: [] for name in tensors}
    for number, message in enumerate(plan.messages):
        where = f"message {number}"
        if not message.chunks:
            raise _fault(plan, f"{where} is empty")
        if message.exchange != DENSE and message.exchange not in plan.exchanges:
            known = ", ".join((DENSE, *plan.exchanges))
            what = f"{where}: unknown exchange {message.exchange!r}; there are: {known}"
            raise _fault(plan, what)
        for chunk in message.chunks:
            _check_chunk(plan, where, chunk, tensors)
            ranges[chunk.tensor].append((chunk.start, chunk.stop, number))
        dtypes = {tensors[chunk.tensor].dtype for chunk in message.chunks}
        if len(dtypes) > 1:
            raise _fault(plan, f"{where} mixes dtypes: {', '.join(sorted(dtypes))}")
        _check_encoded(plan, where, message, tensors)
    _check_order(plan)
    for name, tensor in tensors.items():
        _check_cover(plan, tensor, sorted(ranges[name]))


def _check_chunk(plan: Plan, where: str, chunk: Chunk, tensors: dict[str, ProfiledTensor]) -> None:
    tensor = tensors.get(chunk.tensor)
    if tensor is None:
        raise _fault(
            plan, f"{where}: unknown tensor {chunk.tensor!r}, which is not among those to exchange"
        )
    given = f"{where}: range {chunk.start}:{chunk.stop} of {chunk.tensor!r}"
    if chunk.start >= chunk.stop:
        raise _fault(plan, f"{given} is empty")
    if chunk.start < 0 or chunk.stop > tensor.numel:
        raise _fault(plan, f"{given} lies outside its {tensor.numel} elements")


def _check_encoded(
    plan: Plan, where: str, message: PlannedMessage, tensors: dict[str, ProfiledTensor]
) -> None:
    """Refuses an ``inline`` or ``early`` that the message's exchange cannot keep to."""
    named = [*message.inline, *message.early]
    if not named:
        return
    if message.exchange == DENSE:
        raise _fault(plan, f"{where} is dense, so {named[0]!r} is not encoded")
    carried = [chunk.tensor for chunk in message.chunks]
    for name in named:
        if name not in carried:
            raise _fault(plan, f"{where}: {name!r} is to be encoded, and is not in the message")
        if named.count(name) > 1:
            raise _fault(plan, f"{where}: {name!r} is to be encoded twice")
    if plan.exchanges[message.exchange].sparsifier is None:
        if message.early:
            what = f"{message.early[0]!r} cannot be encoded early, before the others are there"
            raise _fault(plan, f"{where} is encoded as one, so {what}")
        others = [name for name in carried if name not in message.inline]
        if others:
            raise _fault(
                plan,
                f"{where} is encoded as one, so all of its tensors are encoded inline or none; "
                f"{others[0]!r} is not",
            )
        return
    for chunk in message.chunks:
        if chunk.tensor in named and chunk.numel < tensors[chunk.tensor].numel:
            raise _fault(plan, f"{where}: {chunk.tensor!r} is to be encoded by itself, and is cut")


def _check_order(plan: Plan) -> None:
    """Refuses a plan in which messages would wait for ever.

    A message waits for others to be launched (those before it) or to have ended (its ``after``, and
    the one before it on its lane). All of them stand before it, or nothing would move; so an order
    can be met if, and only if, every ``after`` looks back.
    """
    after = {number: message.after for number, message in enumerate(plan.messages)}
    waits = [(number, other) for number, others in after.items() for other in others]
    for number, other in waits:
        what = f"order that cannot be met: message {number} waits for"
        if other not in after:
            raise _fault(plan, f"{what} message {other}; there are 0 to {len(after) - 1}")
        if other == number:
            raise _fault(plan, f"{what} itself")
    ahead = [(number, other) for number, other in waits if other > number]
    if not ahead:
        return
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        way = " waits for ".join(f"message {number}" for number in reversed(error.args[1]))
        raise _fault(plan, f"cyclic dependency: {way}") from None
    number, other = ahead[0]
    what = f"order that cannot be met: message {number} waits for message {other}"
    raise _fault(plan, f"{what}, which is launched after it")


def _check_cover(plan: Plan, tensor: ProfiledTensor, ranges: list[_Range]) -> None:
    reached, last = 0, -1
    for start, stop, number in ranges:
        if start < reached:
            raise _fault(
                plan,
                f"doubled range: {tensor.name!r} elements {start}:{min(stop, reached)} are in "
                f"message {last} and in message {number}",
            )
        if start > reached:
            break
        reached, last = stop, number
    if reached < tensor.numel:
        following = next((start for start, _, _ in ranges if start > reached), tensor.numel)
        raise _fault(
            plan, f"lost elements: {tensor.name!r} elements {reached}:{following} are in no message"
        )


def _fault(plan: Plan, what: str) -> InvalidSetting:
    return InvalidSetting(
        f"plan of {plan.planner!r} for {plan.model!r} cannot be used: {what}; "
        "plan again for this model"
    )
