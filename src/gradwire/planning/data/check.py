"""check: does a plan carry every element exactly once, and can it be carried out?

A sound plan may be slow. If its first message waits for the last gradient of the
backward pass, nothing overlaps. Such a plan can be carried out, so it is no error.
``gradwire plan --explain`` says what it costs.
"""

from collections.abc import Iterator, Sequence

from ...errors import InvalidSetting
from .plan import DENSE, Plan, PlannedMessage
from .profile import Profile, ProfiledTensor

TensorsByName = dict[str, ProfiledTensor]


def check(plan: Plan, profile: Profile) -> None:
    """Returns if ``plan`` is sound for ``profile``.

    Messages are numbered from 0 in errors.

    Raises ``InvalidSetting`` that names the first fault found: a plan of another model,
    a credit below 1, an unknown exchange or tensor, an empty message, a range outside
    its tensor, mixed dtypes in one message, an encode that its exchange cannot do where
    it is to be done, an order that cannot be met, doubled or lost elements.
    """
    for fault in _faults(plan, profile):
        raise InvalidSetting(
            f"plan of {plan.planner!r} for {plan.model!r} cannot be used: {fault}; "
            "plan again for this model"
        )


def _faults(plan: Plan, profile: Profile) -> Iterator[str]:
    """The faults of a plan; later ones are only faults if the first were none."""
    if plan.model != profile.model:
        yield f"made for model {plan.model!r}, and the profile is of {profile.model!r}"
    if plan.credit < 1:
        yield f"credit {plan.credit} lets no message start; 1 or more is accepted"
    if DENSE in plan.exchanges:
        yield f"exchange {DENSE!r} is built in and cannot be defined again"
    tensors = profile.tensors
    ranges: dict[str, list[tuple[int, int, int]]] = {name: [] for name in tensors}
    for number, message in enumerate(plan.messages):
        where = f"message {number}"
        if not message.chunks:
            yield f"{where} is empty"
        if message.exchange != DENSE and message.exchange not in plan.exchanges:
            known = ", ".join((DENSE, *plan.exchanges))
            yield f"{where}: unknown exchange {message.exchange!r}; there are: {known}"
        yield from (f"{where}: {fault}" for fault in _of_chunks(message, tensors))
        yield from (f"{where}{fault}" for fault in _of_encodes(plan, message, tensors))
        for chunk in message.chunks:
            ranges[chunk.tensor].append((chunk.start, chunk.stop, number))
    yield from _of_order(plan)
    for name, tensor in tensors.items():
        yield from _of_cover(tensor, sorted(ranges[name]))


def _of_chunks(message: PlannedMessage, tensors: TensorsByName) -> Iterator[str]:
    for chunk in message.chunks:
        tensor = tensors.get(chunk.tensor)
        if tensor is None:
            yield (
                f"unknown tensor {chunk.tensor!r}, which is not among those to exchange"
            )
            continue
        given = f"range {chunk.start}:{chunk.stop} of {chunk.tensor!r}"
        if chunk.start >= chunk.stop:
            yield f"{given} is empty"
        if chunk.start < 0 or chunk.stop > tensor.numel:
            yield f"{given} lies outside its {tensor.numel} elements"


def _of_encodes(
    plan: Plan, message: PlannedMessage, tensors: TensorsByName
) -> Iterator[str]:
    """Mixed dtypes, and an ``inline`` or ``early`` that the exchange cannot keep to."""
    dtypes = {tensors[chunk.tensor].dtype for chunk in message.chunks}
    if len(dtypes) > 1:
        yield f" mixes dtypes: {', '.join(sorted(dtypes))}"
    named = [*message.inline, *message.early]
    if not named:
        return
    if message.exchange == DENSE:
        yield f" is dense, so {named[0]!r} is not encoded"
    yield from _of_names(message, named)
    if plan.exchanges[message.exchange].sparsifier is None:
        yield from _of_one_encode(message)
    else:
        yield from _of_cut_tensors(message, named, tensors)


def _of_names(message: PlannedMessage, named: Sequence[str]) -> Iterator[str]:
    """Tensors to encode that the message does not carry, or that are named twice."""
    carried = [chunk.tensor for chunk in message.chunks]
    for name in named:
        if name not in carried:
            yield f": {name!r} is to be encoded, and is not in the message"
        if named.count(name) > 1:
            yield f": {name!r} is to be encoded twice"


def _of_one_encode(message: PlannedMessage) -> Iterator[str]:
    """Tensors that one call encodes, where only some are encoded inline or early."""
    if message.early:
        early = f"{message.early[0]!r} cannot be encoded early"
        yield f" is encoded as one, so {early}, before the others are there"
    for chunk in message.chunks:
        if chunk.tensor not in message.inline:
            yield (
                " is encoded as one, so all of its tensors are encoded inline or none; "
                f"{chunk.tensor!r} is not"
            )


def _of_cut_tensors(
    message: PlannedMessage, named: Sequence[str], tensors: TensorsByName
) -> Iterator[str]:
    """Tensors to be encoded by themselves, and that the message has only a part of."""
    for chunk in message.chunks:
        if chunk.tensor in named and chunk.numel < tensors[chunk.tensor].numel:
            yield f": {chunk.tensor!r} is to be encoded by itself, and is cut"


def _of_order(plan: Plan) -> Iterator[str]:
    """Messages that would wait for ever.

    A message waits until all messages before it are launched. It also waits until the
    messages of its ``after``, and the message before it on its lane, have ended. So an
    order can be met if, and only if, every ``after`` names earlier messages.
    """
    for number, message in enumerate(plan.messages):
        for other in message.after:
            if not 0 <= other < number:
                yield (
                    f"order that cannot be met: message {number} waits for message "
                    f"{other}, which does not stand before it"
                )


def _of_cover(
    tensor: ProfiledTensor, ranges: list[tuple[int, int, int]]
) -> Iterator[str]:
    """Elements of a tensor that are doubled or lost, by messages' ascending ranges."""
    reached = 0
    last = -1
    for start, stop, number in (*ranges, (tensor.numel, tensor.numel, -1)):
        if start < reached:
            both = f"{tensor.name!r} elements {start}:{min(stop, reached)} are in"
            yield f"doubled range: {both} message {last} and in message {number}"
        if start > reached:
            yield (
                f"lost elements: {tensor.name!r} elements {reached}:{start} are in "
                "no message"
            )
        reached = stop
        last = number
