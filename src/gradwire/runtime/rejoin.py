"""Rejoin: a newcomer comes in between two steps, and is healed from rank 0.

Rank 0 sees it at its door and says so in the confirmation of a step (`commit`), by which all ranks
know it before the same next step. There they connect anew beside the connections that they have,
rank 0 sends what ranks share (`heal`), and all obey one verdict (`newcomers`). Until then nothing
of the present world has changed, so a newcomer that dies leaves it as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from ..errors import InvalidSetting, invalid
from .engine import Engine
from .fingerprint import Fingerprint
from .heal import Healing, receive, send
from .membership import Membership
from .messages import Message
from .newcomers import (
    GO,
    Asking,
    Offer,
    agreed,
    await_offer,
    membership,
    refused,
    show_offer,
)
from .wire import Group, come_by, in_background, open_channels

Joined = tuple[Engine, Group]
"""An engine, and a process group for the user's own calls, among one rank more."""
_LOOK_S = 1.0
"""Seconds between two looks for the signs of life of ranks that may not come."""
Connect = Callable[[Membership], Engine]


def open_group(who: Membership, timeout: timedelta) -> Group:
    """A gloo group of these ranks for the user's own collectives.

    torch.distributed has no public way to a registered group that a process outside of the default
    group is in. It takes this one in calls that name no rank of the default group.
    """
    return open_channels(f"{who.name}/group", who.rank, who.world, 1, timeout)[0]


def _joined(connect: Connect, who: Membership, heal: Callable[[Engine], None]) -> Joined:
    engine = connect(who)
    try:
        group = open_group(who, engine.timeout)
        heal(engine)
    except BaseException:
        engine.close()
        raise
    return engine, group


def _drop(work: Future[Any]) -> None:
    """Gives back what a newcomer that stays out was connected by."""
    if work.exception() is None:
        in_background(work.result()[0].close)


def admit(
    old: Engine,
    offer: Offer,
    connect: Connect,
    packed: Callable[[], Any],
) -> Joined | str:
    """Takes a newcomer in beside the ranks of ``old``, or says why it stays out.

    ``packed`` is called on rank 0 for the bytes that heal it; what it raises keeps it out.
    """
    number, world = offer.number, old.world + 1
    who = membership(number, old.rank, world)
    data, objection = None, None
    if old.rank == 0:
        try:
            data = packed()
        except InvalidSetting as error:
            objection = error

    def work() -> Joined:
        if objection is not None:
            raise objection
        if old.rank == 0:
            show_offer(offer, old.timeout)
        else:
            await_offer(number, old.check, old.timeout)

        def heal(engine: Engine) -> None:
            if data is not None:
                send(data, world - 1, engine.first_channel)

        return _joined(connect, who, heal)

    looked_s = time.monotonic()

    def check() -> None:
        nonlocal looked_s
        old.check()
        if time.monotonic() - looked_s > _LOOK_S:  # nothing is sent there now that could fail
            old.refuse_silence(offer.step)
            looked_s = time.monotonic()

    working = in_background(work)
    verdict = agreed(who, number, working, check, old.timeout)
    if verdict == GO:
        joined: Joined = working.result()
        return joined
    working.add_done_callback(_drop)
    return verdict


class Place(NamedTuple):
    """The place that a newcomer has found in a run."""

    engine: Engine
    group: Group
    offer: Offer
    seconds: float


class Newcomer:
    """This process on its way into a run whose ranks meet in ``store``."""

    def __init__(self, store: Store, *others: object) -> None:
        if not isinstance(store, Store):
            remedy = "write dist.TCPStore(host, port) with the job's MASTER_ADDR and MASTER_PORT"
            raise invalid("rejoin", store, "the job's store, a torch.distributed.Store", remedy)
        if dist.is_initialized() and dist.get_world_size() > 1:
            given = f"one of {dist.get_world_size()} ranks"
            remedy = "leave init_process_group() out where rejoin= is given"
            raise invalid("this process", given, "alone beside rejoin=", remedy)
        if any(one is not None for one in others):
            accepted = "left out beside rejoin=, as the run has its ranks already"
            raise invalid("group, shards and mesh", others, accepted, "leave them out")
        self._store, self._start_s = store, time.monotonic()
        self._asking: Asking | None = None
        self._offer: Offer | None = None

    def refuse(self, on_failure: str, optimizer: Optimizer | None) -> None:
        """Raises ``InvalidSetting`` where a run could not take this process in."""
        if on_failure != "shrink":
            remedy = "write on_failure='shrink', as the ranks of the run must have done"
            raise invalid("on_failure", on_failure, "'shrink' beside rejoin=", remedy)
        if not isinstance(optimizer, Optimizer):
            remedy = "give optimizer= here and on the ranks of the run, which send its state"
            raise invalid("optimizer", None, "the model's optimizer beside rejoin=", remedy)

    def ask(self, own: Fingerprint, timeout: timedelta) -> Membership:
        """This process's place in the run; raises ``RanksDiffer`` or ``RankFailed`` without one."""
        come_by(self._store)
        self._asking = Asking(own, timeout)
        try:
            self._offer = self._asking.offer(timeout)
        except BaseException:
            self._asking.end()
            raise
        return self._offer.who

    def enter(
        self, connect: Connect, healing: Healing, messages: Sequence[Message], timeout: timedelta
    ) -> Place:
        """Connects, takes over what ranks share, and hears the verdict."""
        offer, asking = self._offer, self._asking
        assert offer is not None, "it has asked before"
        assert asking is not None

        def heal(engine: Engine) -> None:
            healing.take_over(receive(0, engine.first_channel), messages)

        working = in_background(lambda: _joined(connect, offer.who, heal))
        try:
            verdict = agreed(offer.who, offer.number, working, lambda: None, timeout)
        finally:
            asking.end()
        if verdict != GO:
            working.add_done_callback(_drop)
            raise refused(verdict)
        engine, group = working.result()
        return Place(engine, group, offer, time.monotonic() - self._start_s)
