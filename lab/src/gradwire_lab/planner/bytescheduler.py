"""bytescheduler: blocks of one size, those of the first layers first, a few at a time.

Source: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
    Acceleration" (SOSP 2019), sections 3 and 4; figures 2c and 3b of US-Byte.
Differences from the paper: which block is the most urgent one that is ready is found
    out by playing the schedule on the profile's times, and is then fixed, so that all
    ranks issue the same order. ``credit`` counts blocks, as in US-Byte's evaluation.
    ``credit_bytes`` is the credit of ByteScheduler's paper (section 3.2): a window that
    slides over the bytes of blocks, in the order in which they start. The settings are
    given here, with US-Byte's fixed ones as defaults; the paper searches them, as
    ``tune=True`` does.
Settings: partition_bytes, the size of a block (a layer's last block may be smaller);
    credit, how many blocks are on the wire at once; credit_bytes, how many bytes.
Order: that of priority scheduling; a layer's next forward waits for its own blocks
only.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from gradwire.errors import invalid
from gradwire.planning.buckets import buckets, check_bytes
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan, PlannedMessage, Setting
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner_settings import SIZES, WholeNumbers
from gradwire.planning.simulation.closed_form import (
    NEVER,
    SharedLink,
    backward_ends,
    carry,
)

from ..planning.blocks import block_starts, item_bytes, message_of
from ..planning.curves import check_credit

LANES = WholeNumbers(1, 8)
"""Numbers of messages at once. Each is a channel: a process group with its own
connections.
"""

SEARCH = {"partition_bytes": SIZES, "credit": LANES}

MOST_MESSAGES = 2**18
"""The most messages of a plan. So many take half a gigabyte of memory and a minute to
price.
"""


def bytescheduler(
    profile: Profile,
    cluster: Cluster,
    *,
    partition_bytes: int = 4 * 2**20,
    credit: int = 2,
    credit_bytes: int | None = None,
) -> Plan:
    """The plan of ByteScheduler's priority scheduling for this profile and cluster.

    Args:
        profile: The model's layers.
        cluster: Ranks and links.
        partition_bytes: Bytes of a block, from 1; default 4 MiB. A layer's last block
            may be smaller. Smaller blocks let an urgent layer wait less, and pay more
            latencies.
        credit: The number of blocks on their way at once, from 1 to 65536; default 2.
            More hide latencies, and let an urgent layer wait longer.
        credit_bytes: The bytes of blocks on their way at once, from 1: a block starts
            once they and its own are at most so many, or none is on its way. Default
            None: ``credit`` alone limits them.

    Returns:
        The plan.

    Raises:
        InvalidSetting: A value is out of range, or the plan would have too many
            messages.
    """
    check_bytes("partition_bytes", partition_bytes)
    check_credit(credit)
    if credit_bytes is not None:
        check_bytes("credit_bytes", credit_bytes)
    cut = [(one, block_starts(one, partition_bytes)) for one in buckets(profile)]
    num_messages = sum(len(starts) for _, starts in cut)
    if num_messages > MOST_MESSAGES:
        accepted = f"a size that cuts this model into at most {MOST_MESSAGES} messages"
        and_not = f"{accepted}, and not {num_messages}"
        raise invalid("partition_bytes", partition_bytes, and_not, "write a larger one")
    ends_s = backward_ends(profile, cluster)
    messages: list[PlannedMessage] = []
    ready_s: list[float] = []
    parts_s: list[tuple[float, float]] = []
    sizes_bytes: list[int] = []
    for bucket, starts in cut:
        for start in starts:
            messages.append(message_of(bucket, start, start + starts.step))
            ready_s.append(ends_s[bucket.layer])
            numel = sum(chunk.numel for chunk in messages[-1].chunks)
            sizes_bytes.append(numel * item_bytes(bucket))
            parts_s.append(cluster.parts_s("all_reduce", sizes_bytes[-1]))
    # Made in forward order, so a message's own number is its priority.
    settings: dict[str, Setting] = {
        "partition_bytes": partition_bytes,
        "credit": credit,
    }
    if credit_bytes is None:
        order = carry(ready_s, parts_s, credit, urgency=range(len(messages))).order
        started = [messages[i] for i in order]
    else:
        settings["credit_bytes"] = credit_bytes
        window = Window(credit_bytes, credit)
        order = _order_under(window, ready_s, parts_s, sizes_bytes)
        started = [
            messages[i].model_copy(update={"after": after})
            for i, after in zip(
                order, window.waits([sizes_bytes[i] for i in order]), strict=True
            )
        ]
    return Plan(
        planner="bytescheduler",
        model=profile.model,
        settings=settings,
        messages=tuple(started),
        credit=credit,
        overlap_forward=True,
    )


# ---- A credit in bytes ---------------------------------------------------------------


@dataclass
class Window:
    """Blocks on their way, from the first that has not ended to the last started."""

    limit_bytes: int
    limit: int
    sizes_bytes: deque[int] = field(default_factory=deque)

    def lets_in(self, size_bytes: int) -> bool:
        """Whether a block of so many bytes may start beside the window's."""
        if not self.sizes_bytes:
            return True
        has_room = sum(self.sizes_bytes) + size_bytes <= self.limit_bytes
        return has_room and len(self.sizes_bytes) < self.limit

    def waits(self, sizes_bytes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """For each block in the order of their starts, the blocks that must end first.

        A block that an earlier one has waited for is not named again.

        >>> list(Window(100, 8).waits([60, 40, 30, 100]))
        [(), (), (0,), (1, 2)]
        """
        window = Window(self.limit_bytes, self.limit)
        first = 0
        for size_bytes in sizes_bytes:
            before = first
            while not window.lets_in(size_bytes):
                window.sizes_bytes.popleft()
                first += 1
            window.sizes_bytes.append(size_bytes)
            yield tuple(range(before, first))


def _order_under(
    window: Window,
    ready_s: Sequence[float],
    parts_s: Sequence[tuple[float, float]],
    sizes_bytes: Sequence[int],
) -> list[int]:
    """The order in which messages start if the most urgent ready one is always next."""
    order: list[int] = []
    num_ended = 0
    ended: set[int] = set()
    coming = sorted(range(len(ready_s)), key=lambda i: (ready_s[i], i), reverse=True)
    ready: list[int] = []
    link = SharedLink()
    while link.now_s < NEVER:
        while coming and ready_s[coming[-1]] <= link.now_s:
            heapq.heappush(ready, coming.pop())
        while ready and window.lets_in(sizes_bytes[ready[0]]):
            message = heapq.heappop(ready)
            order.append(message)
            window.sizes_bytes.append(sizes_bytes[message])
            link.start(message, *parts_s[message])
        just_ended = link.advance(ready_s[coming[-1]] if coming else NEVER)
        if just_ended is not None:
            ended.add(just_ended)
        while num_ended < len(order) and order[num_ended] in ended:
            num_ended += 1
            window.sizes_bytes.popleft()
    return order


EXAMPLES = (
    bytescheduler,
    partial(bytescheduler, partition_bytes=96, credit=3),
    partial(bytescheduler, partition_bytes=96, credit=4, credit_bytes=200),
)
