"""The network: links, and the flows that share them.

The model: full-duplex links of one rate meet in a switch that never blocks, so every rank has two
sides, one that transmits and one that receives. A transfer takes a share of its sender's
transmitting side and of its receiver's receiving side; a library collective is taken to keep every
side of every rank equally busy, which a broadcast's tree does not. All flows under way share the
sides max-min fairly: no flow can be given more without taking from one that has no more than it.
Source: progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2); the fluid
    model of SimGrid. Not modelled: slow start, losses, a fabric that is narrower than its links.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count

NEVER = float("inf")

Side = int
"""Rank r transmits on side r and receives on side ~r."""


class Flow:
    """A transfer or a collective on its way.

    At the time ``since_s`` it still needed ``left_s`` seconds of a whole link.
    """

    __slots__ = ("done", "left_s", "share", "sides", "since_s", "target_s")

    def __init__(self, work_s: float, done: Callable[[], None], sides: tuple[Side, ...]) -> None:
        self.left_s, self.done, self.sides = work_s, done, sides
        self.share = 0.0
        self.since_s = 0.0
        self.target_s = NEVER


class _Pool:
    """Flows that speed up and slow down together, on a clock of their own.

    On that clock their ends stay put.
    """

    def __init__(self) -> None:
        self.served_s = 0.0
        self.speed = 1.0
        self._heap: list[tuple[float, int, Flow]] = []
        self._count = count()

    def put(self, flow: Flow, target_s: float) -> None:
        """Sets, or changes, when the flow ends on this clock."""
        flow.target_s = target_s
        heapq.heappush(self._heap, (target_s, next(self._count), flow))

    def next_s(self) -> float:
        """Seconds from now to the first end."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].target_s:  # it was changed since
            heapq.heappop(heap)
        return max(0.0, heap[0][0] - self.served_s) / self.speed if heap else NEVER

    def ended(self, at_least_one: bool) -> list[Flow]:
        """Removes the flows that have ended; rounding may have left a hair of a flow."""
        if at_least_one and self.next_s() < NEVER:
            self.served_s = max(self.served_s, self._heap[0][0])
        found = []
        while self.next_s() == 0.0:
            flow = heapq.heappop(self._heap)[2]
            flow.target_s = NEVER
            found.append(flow)
        return found


class Network:
    """All flows on their way among ranks, from one moment to the next."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._joint = _Pool()
        self._pairs = _Pool()  # its clock goes as fast as what collectives leave of each side
        self._num_joint = 0
        self._at: dict[Side, dict[Flow, None]] = {}  # a dict keeps its order, a set does not
        self._changed: dict[Side, None] = {}
        self._stale = False

    def collective(self, work_s: float, done: Callable[[], None]) -> Flow:
        """Starts a collective that takes ``work_s`` if it is alone; calls ``done`` at its end."""
        flow = Flow(work_s, done, ())
        self._num_joint += 1
        self._joint.put(flow, self._joint.served_s + work_s)
        self._stale = True
        return flow

    def transfer(self, src: int, dst: int, work_s: float, done: Callable[[], None]) -> Flow:
        """Starts a transfer of ``work_s`` seconds of a whole link; calls ``done`` at its end."""
        flow = Flow(work_s, done, (src, ~dst))
        flow.since_s = self._pairs.served_s
        for side in flow.sides:
            self._at.setdefault(side, {})[flow] = None
            self._changed[side] = None
        self._stale = True
        return flow

    def next_end_s(self) -> float:
        """The second at which the next flow ends if none starts before; ``NEVER`` if there is
        none."""
        self._rebalance()
        return self._now_s + min(self._joint.next_s(), self._pairs.next_s())

    def advance(self, now_s: float) -> None:
        """Moves to ``now_s``, at most ``next_end_s()``; calls ``done`` of flows that end there."""
        self._rebalance()
        joint, pairs = self._joint, self._pairs
        passed_s = now_s - self._now_s
        joint_s, pairs_s = joint.next_s(), pairs.next_s()
        is_end = now_s >= self._now_s + min(joint_s, pairs_s)
        joint.served_s += passed_s * joint.speed
        pairs.served_s += passed_s * pairs.speed
        self._now_s = now_s
        if not is_end:
            return
        ended = joint.ended(joint_s <= pairs_s)
        self._num_joint -= len(ended)
        for flow in pairs.ended(pairs_s <= joint_s):
            ended.append(flow)
            for side in flow.sides:
                del self._at[side][flow]
                self._changed[side] = None
        self._stale = True
        for flow in ended:
            flow.done()

    def rate(self, flow: Flow) -> float:
        """The share of a whole link that a flow has now."""
        self._rebalance()
        return flow.share * self._pairs.speed if flow.sides else self._joint.speed

    def load(self, side: Side) -> float:
        """The share of a side that is in use now."""
        self._rebalance()
        of_pairs = sum(flow.share for flow in self._at.get(side, ())) * self._pairs.speed
        return of_pairs + self._num_joint * self._joint.speed

    def _rebalance(self) -> None:
        """Shares everything out again if something has started or ended.

        The side with most flows is full first, and every collective uses that side. So with J
        collectives and at most M transfers a side, each collective gets 1/(J+M) and the transfers
        share the other M/(J+M) of every side as they would share the whole.
        """
        if not self._stale:
            return
        self._stale = False
        flows, sides = self._touched(self._changed)
        self._changed = {}
        if flows:
            self._fill(flows, sides)
        if self._num_joint:
            most = max(map(len, self._at.values()), default=0)
            self._joint.speed = 1 / (self._num_joint + most)
            self._pairs.speed = most / (self._num_joint + most) if most else 1.0
        else:
            self._pairs.speed = 1.0

    def _touched(self, changed: Iterable[Side]) -> tuple[list[Flow], list[Side]]:
        """The transfers and sides connected to the changed ones; no other share changes."""
        flows: dict[Flow, None] = {}
        seen = dict.fromkeys(changed)
        queue = list(seen)
        for side in queue:
            for flow in self._at.get(side, ()):
                flows[flow] = None
                for other in flow.sides:
                    if other not in seen:
                        seen[other] = None
                        queue.append(other)
        return list(flows), queue

    def _fill(self, flows: list[Flow], sides: list[Side]) -> None:
        """Progressive filling: the side where the equal share is smallest is full first."""
        left = dict.fromkeys(sides, 1.0)
        waiting = {side: len(self._at[side]) for side in sides if self._at.get(side)}
        shares: dict[Flow, float] = {}
        while len(shares) < len(flows):
            full = min(waiting, key=lambda side: left[side] / waiting[side])
            share = left[full] / waiting[full]
            for flow in self._at[full]:
                if flow in shares:
                    continue
                shares[flow] = share
                for side in flow.sides:
                    left[side] -= share
                    waiting[side] -= 1
                    if not waiting[side]:
                        del waiting[side]
        for flow, share in shares.items():
            self._set_share(flow, share)

    def _set_share(self, flow: Flow, share: float) -> None:
        if share == flow.share:
            return
        now_s = self._pairs.served_s
        flow.left_s = max(0.0, flow.left_s - flow.share * (now_s - flow.since_s))
        flow.since_s, flow.share = now_s, share
        self._pairs.put(flow, now_s + flow.left_s / share)
