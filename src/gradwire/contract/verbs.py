"""The verbs: all that an algorithm which communicates may ask for.

An algorithm is a generator. It yields one verb, or a tuple of verbs that may run at the
same time, and is resumed when all of them are done, with the verb's result (or the
tuple of results). Computations of one tuple are done one behind the other, in its
order. Computations of several messages may overlap. Steps never know who carries
their verbs out: the local driver, the runtime or the simulator.

Buffers are 1-D and contiguous. A verb's buffers belong to the driver until it resumes
the generator; a computation beside it may read what is only sent. Which verbs come in
which order must not depend on gradient values; their sizes may.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class Among(Enum):
    """The ranks that a verb for the network is for.

    Ranks that it names are counted among them.
    """

    RANKS = "ranks"
    """The ranks that average the message, with gradients of the same elements."""
    SHARDS = "shards"
    """The ranks with parts of the same layers: a tensor-parallel group, in order.

    They issue the same messages in the same order, of gradients that may be of other
    lengths.
    """
    HOST = "a host's ranks"
    """The ranks that average the message and are on the same host, in order."""
    HOSTS = "hosts"
    """The ranks with this place on their hosts that average the message.

    They are in the order of hosts.
    """

    # Enum's own is Python, and each verb is looked up by it several times.
    __hash__ = object.__hash__

    @property
    def ending(self) -> str:
        """The end of the name of a communication among these ranks."""
        return "" if self is Among.RANKS else f" among {self.value}"


@dataclass(frozen=True, slots=True)
class Send:
    """Sends ``buf`` to rank ``dst``.

    Done when the receiver has it or the network holds it.
    """

    dst: int
    buf: Tensor
    among: Among = Among.RANKS


@dataclass(frozen=True, slots=True)
class Recv:
    """Fills ``buf`` with the bytes that rank ``src`` sends next to this rank."""

    src: int
    buf: Tensor
    among: Among = Among.RANKS


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Replaces ``buf`` by the element-wise sum over ranks; the same bits everywhere."""

    buf: Tensor
    among: Among = Among.RANKS


@dataclass(frozen=True, slots=True)
class AllGather:
    """``out`` becomes every rank's ``buf`` in rank order.

    All ``buf`` are of one length.
    """

    out: Tensor
    buf: Tensor
    among: Among = Among.RANKS


class Room(ABC):
    """Memory that a rank writes, and that other ranks of its host may read.

    A driver whose ranks read each other's memory calls the methods; another one calls
    ``settle(is_lent=False)``.
    """

    own_M: Tensor
    """This rank's memory."""
    parts: list[Tensor] | None
    """The rooms of all ranks of the host in rank order, once all are mapped."""
    is_open: bool
    """Whether the room can be used."""
    why: str
    """The reason why it cannot."""

    @abstractmethod
    def announce(self) -> Sequence[int]:
        """The place where others find this room, once; then zeros."""

    @abstractmethod
    def map(self, announced: Sequence[Sequence[int]], rank: int) -> bool:
        """Maps the rooms that all ranks have ``announced``; returns whether all are."""

    @abstractmethod
    def settle(self, *, is_lent: bool) -> None:
        """Notes the agreement of the host's ranks: all map all rooms, or none."""


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Part i of ``buf`` goes to rank i.

    ``out`` is what the ranks sent here, in rank order.

    ``out_sizes`` and ``in_sizes`` are element counts, one a rank. A driver whose ranks
    read each other's memory may send nothing and leave ``out`` as it is, where ``buf``
    lies in ``room``. Then the verb's result is the list of all ranks' rooms, in rank
    order; else it is None, on all ranks. Others may read a room until this rank's next
    verb among the same ranks.
    """

    out: Tensor
    buf: Tensor
    out_sizes: tuple[int, ...]
    in_sizes: tuple[int, ...]
    among: Among = Among.RANKS
    room: Room | None = None


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """``out`` becomes this rank's equal share of the sum of all ``buf``."""

    out: Tensor
    buf: Tensor
    among: Among = Among.RANKS


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Replaces ``buf`` by that of rank ``src``."""

    src: int
    buf: Tensor
    among: Among = Among.RANKS


@dataclass(frozen=True, slots=True)
class Compute:
    """Runs ``fn``; its return value is the verb's result.

    A small one runs in the thread that resumes the steps. Any other runs on the compute
    lane.

    ``name`` is the one CaSync primitive that is done (encode, decode, merge), or
    another word where it is none of a compressor's: the cost model knows these three.
    ``numel`` is what it counts.
    """

    name: str
    fn: Callable[[], Any]
    numel: int = 0

    @property
    def is_small(self) -> bool:
        """Whether it takes about as long as to wake the lane up, some 0.1 ms."""
        return 0 < self.numel <= _SMALL_NUMEL


_SMALL_NUMEL = 2**17

Communication = (
    Send | Recv | AllReduce | AllGather | AllToAll | ReduceScatter | Broadcast
)
"""A verb for the network."""
Verb = Communication | Compute
Steps = Generator[Verb | tuple[Verb, ...], Any, T]
"""The steps of an exchange, or of a part of one: a generator that yields verbs, is
resumed with their results, and returns a ``T``.
"""


def rewritten(steps: Steps[T], each: Callable[[Any], Steps[Any]]) -> Steps[T]:
    """The same steps, in which ``each`` replaces each verb or tuple of verbs.

    The steps are resumed with the value that ``each`` returns.
    """
    value: Any = None
    while True:
        try:
            asked = steps.send(value)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        value = yield from each(asked)


def carried_out(
    steps: Steps[T], carry: Callable[[tuple[Verb, ...]], Sequence[Any]]
) -> T:
    """Carries steps out in this thread; returns their value.

    ``carry`` does the verbs that may run at the same time, and returns a result for
    each.
    """
    value: Any = None
    while True:
        try:
            asked = steps.send(value)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        results = carry(asked if isinstance(asked, tuple) else (asked,))
        value = tuple(results) if isinstance(asked, tuple) else results[0]
