"""Membership: which ranks take part in one attach, before any of them is connected to another.

Ranks meet in the job's rendezvous store first. There a rank that refuses, or differs, can say so
while nobody waits for it in a collective yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from secrets import token_hex
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ...errors import GradwireError, RankFailed, RanksDiffer
from ..step.wire import Group, in_background, store_for

DEFAULT_PATIENCE = timedelta(minutes=5)
"""The time in which all ranks must have come to their first attach, where the user names none."""
_POLL_S = 0.02
"""Seconds between two looks for the notes of others. Ranks look, as every ``store.wait()`` that
times out writes a warning to the log."""
_LOOK_S = 0.5
"""Seconds between two calls of a ``Look``."""
_LINGER_S = 2 * _LOOK_S
"""Seconds that an error waits for others to hear of it, as its process may hold the store."""


Look = Callable[[Sequence[int], dict[int, str]], None]
"""A function that is told which ranks are absent, and the notes of the others by rank."""

STORE_PATIENCE = timedelta(seconds=4)
"""The time beyond the one asked for in which a store may answer before its host counts as lost."""
_AT_ONCE = timedelta(seconds=6)
"""The time asked for where the store need not wait for any rank."""


class Membership(NamedTuple):
    """This rank among ``world`` ranks, and a ``name`` that all of them know and no other attach
    has.

    The name is empty where this process is alone.
    """

    name: str
    rank: int
    world: int

    def beside(self, name: str) -> Membership:
        """The same ranks under another name, under which they can meet for another purpose."""
        return self._replace(name=f"{self.name}/{name}") if self.name else self

    def on_host(self, ranks_per_host: int) -> Membership:
        """The ranks of this rank's host; ranks are numbered host after host."""
        host, place = divmod(self.rank, ranks_per_host)
        return self._some(f"host {host}", place, ranks_per_host)

    def across_hosts(self, ranks_per_host: int) -> Membership:
        """The ranks that have this rank's place on their hosts, host by host."""
        host, place = divmod(self.rank, ranks_per_host)
        return self._some(f"place {place}", host, self.world // ranks_per_host)

    def _some(self, name: str, rank: int, world: int) -> Membership:
        return Membership(f"{self.name}/{name}", rank, world) if world > 1 else ALONE

    def share(
        self, note: str, timeout: timedelta, *, what: str = "attach", look: Look | None = None
    ) -> list[str]:
        """Every rank's note, in rank order; raises ``RankFailed`` if one does not come in time.

        The error's ``ranks`` are those whose notes did not come. Meanwhile ``look`` is called from
        time to time with the ranks that are still absent and the notes of the others; an error
        that it raises ends the wait.
        """
        notes: list[str] = self._ask(
            lambda store: self._shared(store, note, timeout, what, look), timeout, what, look
        )
        return notes

    def post(self, note: str) -> None:
        """Leaves this rank's note without waiting for the others."""
        self._ask(lambda store: store.set(f"note/{self.rank}", note), _AT_ONCE)

    def linger(self) -> None:
        """Waits until all ranks are about to raise, for a second at most.

        Each calls it before it raises what ends the matter for all, as its process may hold the
        store, in which others have still to read why.
        """
        if self.world > 1:
            wait([in_background(self._until_all_heard)], _LINGER_S)

    @contextlib.contextmanager
    def lingering(self) -> Iterator[None]:
        """``RanksDiffer``, which all ranks raise in this context, leaves it once all have heard."""
        try:
            yield
        except RanksDiffer:
            self.linger()
            raise

    def _until_all_heard(self) -> None:
        store = PrefixStore(f"gradwire/{self.name}", store_for(self.name).clone())
        keys = [f"heard/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], "")
        until_s = time.monotonic() + _LINGER_S
        while time.monotonic() < until_s and not store.check(keys):
            time.sleep(_POLL_S)

    def one_of(self, drawn: str) -> str:
        """The text that one of the ranks has drawn; all ranks get the same one."""
        if not self.name:
            return drawn
        found: str = self._ask(
            lambda store: store.compare_set("drawn", "", drawn).decode(), _AT_ONCE
        )
        return found

    def _shared(
        self, store: Any, note: str, timeout: timedelta, what: str, look: Look | None
    ) -> list[str]:
        store.set(f"note/{self.rank}", note)
        keys = [f"note/{rank}" for rank in range(self.world)]
        start_s = looked_s = time.monotonic()
        while not store.check(keys):
            time.sleep(_POLL_S)
            now_s = time.monotonic()
            if now_s < min(start_s + timeout.total_seconds(), looked_s + _LOOK_S):
                continue
            looked_s = now_s
            found = {r: store.get(k).decode() for r, k in enumerate(keys) if store.check([k])}
            absent = tuple(rank for rank in range(self.world) if rank not in found)
            if look is not None:
                look(absent, found)
            if absent and (now_s - start_s > timeout.total_seconds() or store.check(["absent"])):
                raise self._failed(store, absent, timeout, what)
        return [store.get(key).decode() for key in keys]

    def _failed(
        self, store: Any, absent: tuple[int, ...], timeout: timedelta, what: str
    ) -> RankFailed:
        """The error about ranks that did not come, the same on all that did: the first that gives
        up tells the others."""
        text = store.compare_set("absent", "", ", ".join(map(str, absent))).decode()
        time.sleep(_LINGER_S)
        return RankFailed(
            f"{what} cannot be finished: rank {text} of {self.world} did not call it within "
            f"{timeout}; all ranks of the group must call {what}",
            ranks=tuple(map(int, text.split(", "))),
        )

    def _ask(
        self,
        question: Callable[[Any], Any],
        timeout: timedelta,
        what: str = "attach",
        look: Look | None = None,
    ) -> Any:
        """The store's answer to a question, over a connection that nobody else waits for.

        While the store does not answer, ``look`` is called with no absent ranks and no notes.
        """
        name = f"gradwire/{self.name}"
        asked = in_background(lambda: question(PrefixStore(name, store_for(self.name).clone())))
        deadline_s = time.monotonic() + (timeout + STORE_PATIENCE).total_seconds()
        try:
            while look is not None and time.monotonic() < deadline_s - _LOOK_S:
                with contextlib.suppress(TimeoutError):
                    return asked.result(_LOOK_S)
                look((), {})
            return asked.result(max(0.0, deadline_s - time.monotonic()))
        except GradwireError:
            raise
        except (dist.DistError, TimeoutError) as error:
            first, _, _ = str(error).partition("\n")
            raise RankFailed(
                f"{what} cannot be finished: the job's store, where ranks meet, "
                + (f"is lost ({first})" if first else f"gave no answer within {timeout} and more")
                + "; it is lost or stopped with the process that holds it: rank 0 of the job, or "
                "the agent of torchrun that started it; start the job again",
                ranks=(0,) if self.name.split("-")[0] == "0" else (),
            ) from error


def run_of(who: Membership) -> str:
    """A name, the same on all ranks, for the run that begins now; no other run has it."""
    return who.one_of(token_hex(8))


def join(group: Group | None, timeout: timedelta = DEFAULT_PATIENCE) -> Membership:
    """This rank's place in ``group`` (None: all ranks, or this process alone).

    Every rank must call this once in each attach: the number of calls is part of the name. Under
    torchrun the first call waits for the other ranks, for ``timeout`` at most.
    """
    if not dist.is_initialized():
        return ALONE
    return join_ranks(tuple(dist.get_process_group_ranks(group or dist.group.WORLD)), timeout)


def join_ranks(ranks: tuple[int, ...], timeout: timedelta = DEFAULT_PATIENCE) -> Membership:
    """This rank's place among ``ranks``, which are numbers among all ranks; as ``join``."""
    if len(ranks) == 1:
        return ALONE
    own = Membership("-".join(map(str, ranks)), ranks.index(dist.get_rank()), len(ranks))
    if not _JOINED[ranks] and "TORCHELASTIC_RESTART_COUNT" in os.environ:
        _ROLLS[ranks] = _rolled(own, timeout)
    _JOINED[ranks] += 1
    return own.beside(f"{_ROLLS.get(ranks, '')}{_JOINED[ranks]}")


def _rolled(who: Membership, timeout: timedelta) -> str:
    """A word that only these processes share, however often torchrun has restarted the job.

    Its agent keeps the store, so notes and alarms of processes that have died are still there. The
    count of restarts does not tell them apart, as each host's agent counts its own. So each process
    draws a word, and notes all words that it sees. Only one that lives has seen this one's; where
    all have seen the same, all live.
    """
    own = token_hex(8)

    def roll(store: Any) -> str:
        store.set(f"word/{who.rank}", own)
        words, seen = ([f"{key}/{r}" for r in range(who.world)] for key in ("word", "seen"))
        noted, start_s = "", time.monotonic()
        while True:
            if store.check(words):
                found = hashlib.sha256(b" ".join(store.multi_get(words))).hexdigest()[:16]
                if found != noted:
                    store.set(f"seen/{who.rank}", noted := found)
                if not _other_than(noted, seen, store):
                    return f"{noted}/"
            if time.monotonic() - start_s > timeout.total_seconds():
                silent = tuple(r for r, key in enumerate(words) if not store.check([key]))
                absent = silent or _other_than(noted, seen, store)
                raise RankFailed(
                    f"attach cannot be finished: rank {', '.join(map(str, absent))} of {who.world} "
                    f"did not call it within {timeout}; all ranks of the group must call attach",
                    ranks=absent,
                )
            time.sleep(_POLL_S)

    found: str = who._ask(roll, timeout)
    return found


def _other_than(noted: str, seen: list[str], store: Any) -> tuple[int, ...]:
    """The ranks that have not seen what this one has noted."""
    return tuple(
        rank
        for rank, key in enumerate(seen)
        if not store.check([key]) or store.get(key).decode() != noted
    )


ALONE = Membership("", 0, 1)
_JOINED: Counter[tuple[int, ...]] = Counter()
"""The number of times that each set of ranks was joined."""
_ROLLS: dict[tuple[int, ...], str] = {}
"""The word that each set of ranks shares in this start of the job."""
