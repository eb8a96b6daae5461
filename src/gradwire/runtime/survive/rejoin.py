"""Rejoin: a newcomer comes into a run between two steps, or stays out.

Ranks meet it in the job's store, by these keys below ``gradwire/rejoin``:

* ``run``: the fingerprint of the run, with which a newcomer compares its own.
* ``asked``: the number of newcomers that have asked; the n-th is newcomer n.
* ``n/label``: the number in the job of a rank that comes back; else empty.
* ``n/beat``: a number that newcomer n counts up while it lives.
* ``n/offer``: the newcomer's place in the run, which rank 0 writes.
* ``n/over``: present once the newcomer is in, or stays out.

Rank 0 sees a newcomer that lives, and says so in the confirmation of a step
(`synchroniser`). So all ranks know it before the same next step. There rank 0 writes
the offer, and all ranks and the newcomer open new connections beside the old ones. All
agree on the newcomer (`membership`): each says that it is ready, or gives a reason
against it. Until then the run among the old ranks is unchanged.

A newcomer takes over from rank 0 all that ranks share, bit for bit. These are
parameters, buffers, the state of the optimizer and of the loss's scaler, and the shared
state of the exchange. State with a value for each element, such as a residual, is each
rank's own. There a newcomer begins as before a first step. The others multiply theirs
by the new number of ranks over the old number, as ``redistribute`` does: a mean over
more ranks has a smaller part of each rank's residual.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.amp import GradScaler
from torch.optim import Optimizer

from ...errors import RankFailed, RanksDiffer, invalid
from ..agreement.fingerprint import (
    REFUSAL,
    Fingerprint,
    difference,
    refusals,
    refusing,
)
from ..engine.engine import Engine
from ..engine.plain import packed, read_packed, receive
from ..liveness.alarm import Alarm
from ..liveness.blame import IN_ATTACH
from ..liveness.membership import Membership
from ..liveness.pulse import (
    ALARM,
    PATIENCE_S,
    PERIOD_S,
    STORE_PATIENCE_S,
    Stillness,
)
from ..state import checkpoint
from ..state.table import fields_of
from ..step.messages import Message
from ..transport.wire import (
    REJOINED,
    Group,
    in_background,
    meet_in,
    missing_keys,
    own_store,
)
from .groups import open_group, register_group, stand_outside


class Healing(NamedTuple):
    """The state of one attached model that a newcomer takes over from the other ranks.

    ``tensors`` returns parameters and buffers. A newcomer must have the same
    ``fingerprint`` (of model, settings and versions).
    """

    tensors: Callable[[], list[Tensor]]
    optimizer: Optimizer | None
    scaler: GradScaler | None
    timeout: timedelta
    fingerprint: str

    def packed(self, messages: Sequence[Message]) -> Tensor:
        """The state as bytes in host memory."""
        kept = checkpoint.collect(messages)
        kept["params"] = fields_of(kept["params"], by_element=False)
        parts = {
            "tensors": [tensor.detach().cpu() for tensor in self.tensors()],
            "optimizer": self.optimizer and self.optimizer.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "exchange": kept,
        }
        return packed(parts)

    def receive(self, messages: Sequence[Message], engine: Engine) -> None:
        """Takes over the state that rank 0 sends."""
        self.take_over(receive(0, engine.routes.first_channel), messages)

    def take_over(self, data: Any, messages: Sequence[Message]) -> None:
        """Replaces this rank's state by the state that another rank has ``packed``."""
        parts = read_packed(data)
        with torch.no_grad():
            for tensor, part in zip(self.tensors(), parts["tensors"], strict=True):
                tensor.copy_(part)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(parts["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(parts["scaler"])
        checkpoint.move(parts["exchange"], messages)


_PLACE = Membership(REJOINED, 0, 1)
"""The membership under whose name newcomers ask the run to take them in."""


class Lookout:
    """Rank 0's look-out for newcomers, on a thread of its own: no step waits for it.

    ``number`` is the number of the living newcomer that has waited longest; 0 if there
    is none. While a newcomer waits, ``on_seen`` is called again and again, with its
    number and its label.
    """

    def __init__(
        self,
        fingerprint: str,
        on_seen: Callable[[int, str], object] = lambda number, label: None,
    ) -> None:
        self.number = 0
        self._fingerprint = fingerprint
        self._on_seen = on_seen
        self._stop = threading.Event()
        self._watching = in_background(self._watch)

    def close(self) -> None:
        """Takes the run out of the store, so that no newcomer asks any more."""
        self._stop.set()
        wait([self._watching], PERIOD_S)

    def _watch(self) -> None:
        with suppress(dist.DistError):  # the pulse says that the store is lost
            store = own_store(REJOINED)
            beats = dict[int, int]()
            for number in range(1, store.add("asked", 0) + 1):
                if store.check([f"{number}/offer"]):
                    # The rank 0 that made this offer is lost.
                    store.set(f"{number}/over", "")
            first = 1
            while not self._stop.wait(PERIOD_S):
                # Again and again, as a former rank 0 deletes it when it ends.
                store.set("run", self._fingerprint)
                # Only the first is asked for: each question to a far store takes long.
                while store.check([f"{first}/over"]):
                    first += 1
                now = {
                    n: store.add(f"{n}/beat", 0)
                    for n in range(first, store.add("asked", 0) + 1)
                    if not store.check([f"{n}/over"])
                }
                alive = [n for n in now if now[n] > beats.get(n, now[n])]
                self.number = min(alive, default=0)
                if self.number:
                    label = store.get(f"{self.number}/label").decode()
                    self._on_seen(self.number, label)
                beats = now
            store.delete_key("run")


class Offer(NamedTuple):
    """The place of newcomer ``number`` in the run: it begins with ``step``.

    ``labels`` are the numbers in the job of all ranks, with the newcomer's as the last.
    """

    number: int
    labels: list[int]
    step: int

    def who(self, rank: int = -1) -> Membership:
        """A rank of the run, by default the newcomer, which comes last."""
        name = f"{REJOINED} {self.number}"
        world = len(self.labels)
        return Membership(name, rank % world, world, tuple(self.labels))


class Admitted(NamedTuple):
    """All ranks and a newcomer, as their engine and their process group know them."""

    engine: Engine
    group: Group
    values: list[Any]
    """The value that each of them has announced."""


def come_together(
    offer: Offer,
    connect: Callable[[Membership], Engine],
    heal: Callable[[Engine], Any],
    timeout: timedelta,
    old: Engine | None = None,
) -> Admitted | str:
    """Connects all ranks and the newcomer; returns a reason if it stays out.

    All of them call this, and get the same answer. ``old`` is the engine of the present
    ranks; the newcomer has none. ``heal`` is called with the new engine on each. It
    returns the value that this rank announces, which has a JSON form.
    """
    who = offer.who() if old is None else offer.who(old.rank)
    name = f"{who.name}/group"
    opened = ExitStack()

    def work() -> tuple[Engine, Group]:
        with refusing(who):
            if who.rank == 0:
                own_store(REJOINED).set(f"{offer.number}/offer", json.dumps(offer[1:]))
            engine = connect(who)
            opened.callback(engine.close)
            group = open_group(name, who.rank, who.world, timeout)
            value = heal(engine)
        who.post([value])
        return engine, group

    def look(absent: object, found: Mapping[int, Any]) -> bool:
        try:
            if old is not None:
                old.check()
                # nothing is sent there now that could fail
                old.refuse_silence(offer.step)
        except RankFailed as failure:
            lost = list(failure.ranks)
            who.post({REFUSAL: f"the run has lost ranks {lost} meanwhile"})
            return True
        return bool(refusals(found))

    def decide(found: Mapping[int, Any]) -> list[Any] | str:
        return _verdict(found, who.world, timeout)

    working = in_background(work)
    in_background(partial(_watch, offer.number, who))
    verdict: list[Any] | str = ""
    what = "a newcomer's attach"
    try:
        verdict = who.agree(
            None, decide, timeout, what=what, look=look, is_partial=True
        )
    finally:
        # Closed only now: a rank that sees them close reports that as the reason.
        if isinstance(verdict, str):
            working.add_done_callback(lambda _: opened.close())
    in_background(partial(_close, offer.number, who, verdict))
    if isinstance(verdict, str):
        return verdict
    engine, group = working.result()
    if old is None and not dist.is_initialized():
        stand_outside(offer.labels[-1])
    register_group(group, name, who.ranks)
    return Admitted(engine, group, verdict)


def _verdict(
    found: Mapping[int, Any], world: int, timeout: timedelta
) -> list[Any] | str:
    """The values of all ranks, or a reason against the newcomer."""
    for reason in refusals(found).values():
        return reason
    if len(found) < world:
        return f"not all ranks were ready within {timeout}"
    return [found[rank][0] for rank in range(world)]


def _watch(number: int, who: Membership) -> None:
    """Refuses a newcomer that shows no sign of life, until its asking is over."""
    store = own_store(REJOINED)
    beat = Stillness()
    while not store.check([f"{number}/over"]):
        if beat.read(store.add(f"{number}/beat", 0)) > PATIENCE_S:
            who.post({REFUSAL: "it shows no sign of life"})
            return
        time.sleep(PERIOD_S / 2)
    if who.rank == who.world - 1:
        # This ends the newcomer's meeting, if no rank has given a verdict.
        who.post({REFUSAL: "its place is gone, with the rank that gave it"})


def _close(number: int, who: Membership, verdict: list[Any] | str) -> None:
    """Notes in the store that a newcomer is in, or stays out."""
    own_store(REJOINED).set(f"{number}/over", "")
    if isinstance(verdict, str):  # a rank that still connects hears it by the pulse
        alarm = Alarm((who.world - 1,), IN_ATTACH, "the newcomer stays out")
        own_store(who.name).compare_set(ALARM, "", alarm.encoded())


class Returning:
    """A process on its way into a run, maybe a rank that comes back.

    ``label`` is the number in the job that it had in the run; None for a new process.
    ``seconds`` is the time until it was in. If it ``asks_again``, it asks until the
    time-out is over, and stays out only then.
    """

    admitted: Admitted
    offer: Offer
    asks_again = False

    def __init__(self, label: int | None = None) -> None:
        self._label = "" if label is None else str(label)
        self.start_s = time.monotonic()
        self.seconds = 0.0

    def ask(self, fingerprint: Fingerprint, timeout: timedelta) -> Membership:
        """This process's place in the run.

        Raises ``RanksDiffer`` or ``RankFailed`` without one.
        """
        patience = patience_of(timeout)
        self._ask = partial(
            _PLACE.ask,
            lambda store: self._asked(store, fingerprint, timeout),
            patience,
        )
        self._end_s = time.monotonic() + timeout.total_seconds()
        self.offer = self._ask()
        return self.offer.who()

    def enter(
        self,
        connect: Callable[[Membership], Engine],
        heal: Callable[[Engine], Any],
        timeout: timedelta,
    ) -> Engine:
        """Connects, takes over what ranks share, and hears the verdict."""
        while isinstance(
            found := come_together(self.offer, connect, heal, timeout), str
        ):
            if not self.asks_again or time.monotonic() > self._end_s:
                raise _stays_out(found)
            self.offer = self._ask()
        self.admitted = found
        self.seconds = time.monotonic() - self.start_s
        return found.engine

    def _asked(self, store: Any, fingerprint: Fingerprint, timeout: timedelta) -> Offer:
        if missing_keys(store, ["run"], timeout.total_seconds()):
            raise RankFailed(
                f"no running job was found in this store within {timeout}; "
                "pass the store of a job whose ranks train with on_failure='shrink'"
            )
        if differs := difference(
            json.loads(store.get("run")), json.loads(json.dumps(fingerprint))
        ):
            raise RanksDiffer(
                f"the run and this newcomer do not train the same thing: {differs}; "
                "start it with the run's model, settings and versions"
            )
        patience = patience_of(timeout)
        number = store.add("asked", 1)
        store.set(f"{number}/label", self._label)
        in_background(lambda: _live(number))
        offer = f"{number}/offer"
        if missing_keys(store, [offer], patience.total_seconds()):
            store.set(f"{number}/over", "")
            raise _stays_out(f"no place was offered within {patience}")
        return Offer(number, *json.loads(store.get(offer)))


class Newcomer(Returning):
    """This process on its way into a run whose ranks meet in ``store``."""

    def __init__(
        self,
        store: Store,
        on_failure: str,
        optimizer: Optimizer | None,
        places: tuple[object, ...],
    ) -> None:
        if not isinstance(store, Store):
            raise invalid("rejoin", store, "the job's store", _STORE)
        if dist.is_initialized() or any(place is not None for place in places):
            accepted = "given in a process of no group"
            raise invalid("rejoin", "one of a group", accepted, _ALONE)
        if on_failure != "shrink" or not isinstance(optimizer, Optimizer):
            given = on_failure, type(optimizer).__name__
            accepted = "beside on_failure='shrink' and an optimizer"
            raise invalid("rejoin", given, accepted, _BOTH)
        meet_in(store)
        super().__init__()


def patience_of(timeout: timedelta) -> timedelta:
    """The longest time until a run offers a place to a newcomer.

    One of its ranks may be stopped. Then the time-out for this rank comes first. After
    that the others agree on who goes on, and end a step.
    """
    return 2 * timeout + timedelta(seconds=STORE_PATIENCE_S)


_STORE = "write dist.TCPStore(host, port) with the job's MASTER_ADDR and MASTER_PORT"
_ALONE = (
    "leave out group=, shards= and mesh=, and init_process_group(): the run has its "
    "ranks"
)
_BOTH = "give both, here and on all ranks, as the optimizer's state is sent"


def _live(number: int) -> None:
    """Shows that this newcomer lives, until it is in, or stays out."""
    store = own_store(REJOINED)
    while not store.check([f"{number}/over"]):
        store.add(f"{number}/beat", 1)
        time.sleep(PERIOD_S / 2)


def _stays_out(why: str) -> RankFailed:
    return RankFailed(
        f"this process could not join: {why}; the running ranks continue without it"
    )
