"""Rejoin: a newcomer comes into a run between two steps, or stays out.

Ranks meet it in the job's store, by these keys below ``gradwire/rejoin``:

* ``run``: the fingerprint of the run, with which a newcomer compares its own.
* ``asked``: the number of newcomers that have asked; the n-th is newcomer n.
* ``n/label``: the number in the job of a rank that comes back; else empty.
* ``n/beat``: a number that newcomer n counts up while it lives.
* ``n/offer``: its place, which rank 0 writes.
* ``n/over``: there once its asking has ended.

Rank 0 sees a newcomer that lives, and says so in the confirmation of a step
(`synchroniser`). So all ranks know it before the same next step. There rank 0 writes
the offer, and all connect anew beside the connections that they have. All agree on the
newcomer (`membership`): each says that it is ready, or has a reason against it. Until
then nothing of the present world has changed.

A newcomer takes over from rank 0 all that ranks share, bit for bit. These are
parameters, buffers, the state of the optimizer and of the loss's scaler, and what the
exchange keeps. A field of the exchange with a value for each element, such as a
residual, is the rank's own. There a newcomer begins as before a first step, and the
others scale theirs by new over old number of ranks, as ``redistribute`` does: a mean
over more ranks delivers less of each.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.amp import GradScaler
from torch.optim import Optimizer

from ...errors import RankFailed, RanksDiffer, invalid
from ..agreement.fingerprint import REFUSAL, Fingerprint, difference
from ..engine.engine import Engine
from ..engine.plain import packed, read_packed, receive
from ..liveness.alarm import Alarm, said
from ..liveness.blame import IN_ATTACH
from ..liveness.membership import Membership
from ..liveness.pulse import (
    PATIENCE_S,
    PERIOD_S,
    STORE_PATIENCE_S,
    Stillness,
    alarm_key,
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
    """The parts of one attached model's training that all ranks share.

    ``tensors`` returns parameters and buffers. ``fingerprint`` is what a newcomer must
    share.
    """

    tensors: Callable[[], list[Tensor]]
    optimizer: Optimizer | None
    scaler: GradScaler | None
    timeout: timedelta
    fingerprint: str

    def packed(self, messages: Sequence[Message]) -> Tensor:
        """All of it as bytes in host memory."""
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
        """Takes over what rank 0 sends."""
        self.take_over(receive(0, engine.routes.first_channel), messages)

    def take_over(self, data: Any, messages: Sequence[Message]) -> None:
        """Puts what ``packed`` has made on another rank in this one's place."""
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
"""The membership under whose name a run and its newcomers meet."""


class Lookout:
    """Rank 0's look-out for newcomers, on a thread of its own: no step waits for it.

    ``number`` is that of the newcomer that has waited longest; 0 where none waits and
    lives. ``on_seen`` is called with it and its ``label`` again and again while it
    waits.
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
        self._thread = threading.Thread(
            target=self._watch, name="gradwire lookout", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Shows the run no more, as no newcomer can come any more."""
        self._stop.set()
        self._thread.join(PERIOD_S)

    def _watch(self) -> None:
        with suppress(dist.DistError):  # the pulse says that the store is lost
            store = own_store(REJOINED)
            beats = dict[int, int]()
            for number in range(1, store.add("asked", 0) + 1):
                if store.check([f"{number}/offer"]):
                    # by a rank 0 that is lost
                    store.set(f"{number}/over", "")
            while not self._stop.wait(PERIOD_S):
                # again and again, as a rank 0 that the others have left deletes it
                store.set("run", self._fingerprint)
                now = {
                    n: store.add(f"{n}/beat", 0)
                    for n in range(1, store.add("asked", 0) + 1)
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
    """Newcomer ``number``'s place: it begins with ``step``, and is the last of
    ``labels``, which are the numbers of its ranks in the job.
    """

    number: int
    labels: list[int]
    step: int

    def who(self, rank: int) -> Membership:
        """A rank among the newcomers."""
        name = f"{REJOINED} {self.number}"
        return Membership(name, rank, len(self.labels), tuple(self.labels))


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
    """All ranks and the newcomer, or why it stays out.

    All ranks get the same. ``old`` is the world that they go on in where it stays out;
    the newcomer has none. ``heal`` is called with the new engine on each. The value
    that it returns has a JSON form.
    """
    who = offer.who(len(offer.labels) - 1 if old is None else old.rank)

    def work() -> tuple[Engine, Group, Any]:
        if old is not None and old.rank == 0:
            own_store(REJOINED).set(f"{offer.number}/offer", json.dumps(offer[1:]))
        engine = connect(who)
        opened.callback(engine.close)
        group = open_group(f"{who.name}/group", who.rank, who.world, timeout)
        return engine, group, heal(engine)

    opened = ExitStack()
    verdict: list[Any] | str = ""
    working = in_background(work)
    try:
        verdict = _Judgement(offer, who, working, old).verdict(timeout)
    finally:
        # a rank that saw the connections close before would give that as the reason
        if isinstance(verdict, str):
            working.add_done_callback(lambda _: opened.close())
    if isinstance(verdict, str):
        return verdict
    engine, group, _ = working.result()
    if old is None and not dist.is_initialized():
        stand_outside(offer.labels[-1])
    register_group(group, f"{who.name}/group", who.ranks)
    return Admitted(engine, group, verdict)


@dataclass
class _Judgement:
    """This rank's part in the verdict of all ranks on a newcomer.

    It is ready once ``working`` has ended well, and announces a list of the value then.
    A reason against the newcomer, of this rank or another, ends the wait.
    """

    offer: Offer
    who: Membership
    working: Future[Any]
    old: Engine | None
    beat: Stillness = field(default_factory=Stillness)
    reason: str = ""

    @cached_property
    def _store(self) -> Any:
        return own_store(REJOINED)

    def verdict(self, timeout: timedelta) -> list[Any] | str:
        """The verdict of all ranks: all values, or a reason against the newcomer."""

        def decide(found: Mapping[int, Any]) -> list[Any] | str:
            for announced in found.values():
                if not isinstance(announced, list):
                    return str(
                        announced if isinstance(announced, str) else announced[REFUSAL]
                    )
            if len(found) < self.who.world:
                return f"not all ranks were ready within {timeout}"
            return [found[rank][0] for rank in range(self.who.world)]

        what = "a newcomer's attach"
        verdict = self.who.agree(
            self._own, decide, timeout, what=what, look=self._look, is_partial=True
        )
        in_background(partial(self._close, verdict))
        return verdict

    def _own(self) -> list[Any] | str | None:
        """This rank's word, if it has one; called in a thread that may wait."""
        beat = self._store.add(f"{self.offer.number}/beat", 0)
        if self.beat.read(beat) > PATIENCE_S:
            self.reason = self.reason or "it shows no sign of life"
        if self.old is None and self._store.check([f"{self.offer.number}/over"]):
            self.reason = self.reason or "its place is gone, with the rank that gave it"
        if self.working.done():
            error = self.working.exception()
            return [self.working.result()[2]] if error is None else said(error)
        return self.reason or None

    def _look(self, absent: object, found: Mapping[int, Any]) -> bool:
        try:
            if self.old is not None:
                self.old.check()
                # nothing is sent there now that could fail
                self.old.refuse_silence(self.offer.step)
        except RankFailed as failure:
            self.reason = f"the run has lost ranks {list(failure.ranks)} meanwhile"
        return bool(self.reason) or any(
            not isinstance(announced, list) for announced in found.values()
        )

    def _close(self, verdict: list[Any] | str) -> None:
        self._store.set(f"{self.offer.number}/over", "")
        if isinstance(verdict, str):  # a rank that still connects hears it by the pulse
            newcomer = self.who.world - 1
            alarm = Alarm((newcomer,), IN_ATTACH, "the newcomer stays out")
            store = own_store(self.who.name)
            store.compare_set(alarm_key(0), "", alarm.encoded())


class Returning:
    """A process on its way into a run, which has had a ``label`` there, or none.

    ``seconds`` is the time that it took. If it ``asks_again``, it stays out only once
    the time-out is over.
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
        return self.offer.who(len(self.offer.labels) - 1)

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
        is_alone = not dist.is_initialized() and all(place is None for place in places)
        if not isinstance(store, Store):
            raise invalid("rejoin", store, "the job's store", _STORE)
        if not is_alone:
            accepted = "given in a process of no group"
            raise invalid("rejoin", "one of a group", accepted, _ALONE)
        if on_failure != "shrink" or not isinstance(optimizer, Optimizer):
            given = on_failure, type(optimizer).__name__
            accepted = "beside on_failure='shrink' and an optimizer"
            raise invalid("rejoin", given, accepted, _BOTH)
        meet_in(store)
        super().__init__()


def patience_of(timeout: timedelta) -> timedelta:
    """The time in which a run offers a place.

    It may have a stopped rank, whose time-out comes first. Then its ranks meet, and end
    a step.
    """
    return 2 * timeout + timedelta(seconds=STORE_PATIENCE_S)


_STORE = "write dist.TCPStore(host, port) with the job's MASTER_ADDR and MASTER_PORT"
_ALONE = (
    "leave out group=, shards= and mesh=, and init_process_group(): the run has its "
    "ranks"
)
_BOTH = "give both, here and on all ranks, as the optimizer's state is sent"


def _live(number: int) -> None:
    """Shows that this newcomer lives, until its asking is over."""
    store = own_store(REJOINED)
    while not store.check([f"{number}/over"]):
        store.add(f"{number}/beat", 1)
        time.sleep(PERIOD_S / 2)


def _stays_out(why: str) -> RankFailed:
    return RankFailed(
        f"this process could not join: {why}; the running ranks continue without it"
    )
