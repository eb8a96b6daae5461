"""Plan: what is sent together, in which pieces, in which order and through which
exchange, as data.

The runtime carries a plan out and the simulator predicts it; neither decides anything
that is not written here, so all ranks that hold the same plan issue the same messages
in the same order.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from .stored import MOST_RANKS, Frozen, NonNegative, Stored, Whole

DENSE = "dense"
"""The exchange without an entry in ``Plan.exchanges``: a plain all-reduce."""

MOST_CREDIT = 2**16
"""The most channels of a plan; each is a process group of its own."""

Setting = bool | int | Annotated[float, Field(allow_inf_nan=False)] | str


class Chunk(Frozen):
    """Elements ``start`` up to, not including, ``stop`` of a tensor's flat gradient."""

    tensor: str
    start: Whole
    stop: Whole

    @property
    def numel(self) -> int:
        return self.stop - self.start


class PlannedMessage(Frozen):
    """Chunks that travel together, one behind the other, through one exchange."""

    chunks: tuple[Chunk, ...]
    exchange: str = DENSE
    after: tuple[Whole, ...] = ()
    """Numbers of messages that must have ended before this one is launched.

    All stand before it.
    """
    inline: tuple[str, ...] = ()
    """Tensors that are encoded within the backward pass, which waits for it.

    An exchange that encodes a message as one does so when the message is launched, and
    ``inline`` holds all of its tensors. One with a ``sparsifier`` encodes each when its
    gradient is ready. Hosts of several ranks encode their sums, on the compute lane,
    whatever is named here or in ``early``.
    """
    early: tuple[str, ...] = ()
    """Tensors that are encoded on the compute lane as soon as their own gradients are
    ready. The host encodes a tensor on a device too, from a copy.

    A message that has tensors here or in ``inline`` has all here that it encodes:
    others travel as they are. One that has none is encoded on the compute lane, when it
    is launched.
    """


class ExchangeSetting(Frozen):
    """How an exchange is made: names of files in ``compress/`` and ``collective/``.

    An algorithm that is an exchange of its own takes no collective.
    """

    compressor: str
    settings: dict[str, Setting] = Field(default_factory=dict)
    collective: str | None = None
    collective_settings: dict[str, Setting] = Field(default_factory=dict)
    error_feedback: bool = False

    @property
    def sparsifier(self) -> str | None:
        """The compressor by which an exchange of its own encodes each tensor by itself.

        None for an exchange that encodes a message as one.
        """
        named = self.settings.get("sparsifier")
        return named if isinstance(named, str) else None

    @property
    def encoder(self) -> str:
        """The compressor whose encode the exchange does."""
        return self.sparsifier or self.compressor


class Bulk(Frozen):
    """The rules of a coordinator, which says when sends travel.

    It is in the package gradwire-lab.

    Args:
        rank: The rank that the coordinator is on. Default: 0.
        timeout_s: Seconds that a send waits on its link for others. Default: 1 ms.
        size_bytes: Bytes on a link that wait no longer. Default: 256 KiB.
        ahead: Batches of a rank that are sent or decided on, from 1 to 4. Default: 2,
            so the next is decided on while one travels. 1 is better among near hosts.

    >>> Bulk(timeout_s=0.01).size_bytes
    262144
    """

    rank: Annotated[Whole, Field(le=MOST_RANKS)] = 0
    timeout_s: NonNegative = 0.001
    size_bytes: Whole = 2**18
    ahead: Annotated[int, Field(ge=1, le=4)] = 2


class Plan(Stored):
    """Messages in issue order, numbered from 0, and the rules of their launch.

    Message i is launched as soon as

    - all messages before it are launched (US-Byte, algorithm 3);
    - all its gradients are ready;
    - the messages in its ``after`` have ended;
    - message i - ``credit`` has ended.

    So message i travels on channel i mod ``credit``, and a channel carries one message
    at a time. A message's channel is the same on every rank, also if another channel is
    free earlier.

    ``gradwire.planning.data.check.check`` checks that a plan suits a model.

    Args:
        planner: The name of the planner that made it.
        model: ``Profile.model`` of the profile that was planned for.
        messages: The messages, in issue order.
        settings: The settings that the planner was called with; a record, which nothing
            acts upon. Default: none.
        credit: The number of channels, and so the most messages on the wire at once.
            Default: 1.
        overlap_forward: True: the next forward pass of a layer waits for the layers
            before it, and for the layer's own messages. False (the default): it waits
            for all messages.
        exchanges: The exchanges by the names that messages give. ``"dense"`` needs no
            entry. Default: none.
        bulk: The rules of a coordinator that starts sends in place of their messages'
            order; it needs the package gradwire-lab. None (the default): no
            coordinator.

    >>> chunk = Chunk(tensor="fc.weight", start=0, stop=1000)
    >>> message = PlannedMessage(chunks=(chunk,))
    >>> Plan(planner="mine", model="small", messages=(message,)).credit
    1
    """

    WRITTEN_BY: ClassVar[str] = "gradwire plan"

    planner: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    settings: dict[str, Setting] = Field(default_factory=dict)
    messages: tuple[PlannedMessage, ...]
    credit: Annotated[int, Field(le=MOST_CREDIT)] = 1
    overlap_forward: bool = False
    exchanges: dict[str, ExchangeSetting] = Field(default_factory=dict)
    bulk: Bulk | None = None
