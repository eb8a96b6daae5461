"""The network: links, and the flows that share them.

The model: full-duplex links meet in a switch that never blocks, so every rank has two
sides, one that transmits and one that receives. Sides may have rates of their own. A
transfer takes a share of its sender's transmitting side and of its receiver's receiving
side. A library collective is taken to keep every side of every rank equally busy,
although a broadcast's tree does not. It is as fast as the slowest side. All flows under
way share the sides max-min fairly: no flow can be given more without taking from one
that has no more than it. Source: progressive filling (Bertsekas and Gallager, Data
Networks, 1992, section 6.5.2); the fluid model of SimGrid. Not modelled: slow start,
losses, a fabric that is narrower than its links.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .closed_form import NEVER

Side = int
"""Rank r transmits on side r and receives on side ~r."""

HAIR = 1e-12
"""The share of a time that rounding may have left of it."""


@dataclass(eq=False, slots=True)
class Flow:
    """A transfer or, without ``sides``, a collective on its way.

    At the time ``since_s`` it still needed ``left_s`` seconds of a whole link.
    """

    left_s: float
    done: Callable[[], None]
    sides: tuple[Side, ...]
    since_s: float
    share: float = 0.0
    end_s: float = NEVER


class Network:
    """All flows on their way among ranks, from one moment to the next."""

    def __init__(self, speeds: Sequence[tuple[float, float]] = ()) -> None:
        """``speeds`` are each rank's rates up and down; the slowest of all is 1.

        Empty: all are 1.
        """
        self._speed: dict[Side, float] = {}
        for rank, (up, down) in enumerate(speeds):
            self._speed[rank] = up
            self._speed[~rank] = down
        # A collective is on all sides, and so on the slowest.
        self._slowest: Side = min(self._speed, key=self._speed.__getitem__, default=0)
        self._now_s = 0.0
        self._flows: dict[Flow, None] = {}  # a dict keeps its order, a set does not
        self._is_stale = False

    def collective(self, work_s: float, done: Callable[[], None]) -> Flow:
        """Starts a collective that takes ``work_s`` if it is alone.

        Calls ``done`` at its end.
        """
        return self._start(work_s, done, ())

    def transfer(
        self, src: int, dst: int, work_s: float, done: Callable[[], None]
    ) -> Flow:
        """Starts a transfer of ``work_s`` seconds of a whole link.

        Calls ``done`` at its end.
        """
        return self._start(work_s, done, (src, ~dst))

    def next_end_s(self) -> float:
        """The second at which the next flow ends if none starts before; ``NEVER`` if
        there is none.
        """
        self._rebalance()
        return min((flow.end_s for flow in self._flows), default=NEVER)

    def advance(self, now_s: float) -> None:
        """Moves to ``now_s``, at most ``next_end_s()``.

        Calls ``done`` of flows that end there.
        """
        self._rebalance()
        self._now_s = now_s
        ended = [flow for flow in self._flows if flow.end_s <= now_s * (1 + HAIR)]
        for flow in ended:
            del self._flows[flow]
            self._is_stale = True
        for flow in ended:
            flow.done()

    def _start(
        self, work_s: float, done: Callable[[], None], sides: tuple[Side, ...]
    ) -> Flow:
        flow = Flow(work_s, done, sides, self._now_s)
        self._flows[flow] = None
        self._is_stale = True
        return flow

    def _rebalance(self) -> None:
        """Shares everything out again if something has started or ended."""
        if not self._is_stale:
            return
        self._is_stale = False
        now_s = self._now_s
        for flow, share in self._shares().items():
            if share != flow.share:
                flow.left_s = max(
                    0.0, flow.left_s - flow.share * (now_s - flow.since_s)
                )
                flow.since_s = now_s
                flow.share = share
                flow.end_s = now_s + flow.left_s / share

    def _shares(self) -> dict[Flow, float]:
        """Progressive filling: the side with the smallest equal share is first full."""
        joint = [flow for flow in self._flows if not flow.sides]
        users: dict[Side, list[Flow]] = {self._slowest: []} if joint else {}
        for flow in self._flows:
            for side in flow.sides:
                users.setdefault(side, []).append(flow)
        left = {side: self._speed.get(side, 1.0) for side in users}
        if not joint and len(users) == 2 * len(self._flows):  # each side has one flow
            return {
                flow: min(left[side] for side in flow.sides) for flow in self._flows
            }
        for own in users.values():
            own.extend(joint)
        waiting = {side: len(own) for side, own in users.items()}
        shares: dict[Flow, float] = {}
        while len(shares) < len(self._flows):
            full = min(waiting, key=lambda side: left[side] / waiting[side])
            share = left[full] / waiting[full]
            for flow in users[full]:
                if flow not in shares:
                    shares[flow] = share
                    for side in flow.sides or users:
                        left[side] -= share
                        waiting[side] -= 1
                        if not waiting[side]:
                            del waiting[side]
        return shares
