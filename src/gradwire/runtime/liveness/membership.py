"""Membership: which ranks take part in one attach, before they are connected.

Ranks meet in the job's rendezvous store. There a rank can refuse, or be found to
differ, before others wait for it in a collective. Every meeting is one call of
``agree``: each rank writes a value, and all read the same values. A pure function of
the values is the verdict. One key, which is written once, says which ranks' values
count. So ranks that have stopped waiting and ranks that come late agree, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ...errors import ExitCode, GradwireError, RankFailed, RanksDiffer, invalid
from ..transport.wire import (
    POLL_S,
    Group,
    in_background,
    missing_keys,
    own_store,
    root_store,
)
from .alarm import listed

DEFAULT_PATIENCE = timedelta(minutes=5)
"""The time in which all ranks must come to their first attach, by default."""
_LOOK_S = 0.5
"""Seconds between two calls of a ``Look``."""
_LINGER_S = 2 * _LOOK_S
"""Seconds that an error waits for others to hear of it.

Its process may hold the store.
"""
MEETING = "meeting"
"""The prefix of the keys by which ranks agree, in a membership's part of the store."""

Verdict = TypeVar("Verdict")
Look = Callable[[Sequence[int], Mapping[int, Any]], object]
"""A function of the absent ranks, and of the other ranks' values by rank.

It returns whether no absent rank will come. An error in it ends the wait, too.
"""

EXTRA_S = 4.0
"""The extra seconds for a store to answer before its host counts as lost."""
_AT_ONCE = timedelta(seconds=6)
"""The time-out of a question for which the store need not wait for any rank."""


class Membership(NamedTuple):
    """This rank's place, ``rank``, among ``world`` ranks that meet under a ``name``.

    All of these ranks know the name, and no other attach has it. A rank that is alone
    from the start needs no name. ``ranks`` are the ranks' numbers in the job; empty
    stands for 0, 1, 2 and so on.
    """

    name: str
    rank: int
    world: int
    ranks: tuple[int, ...] = ()

    def in_job(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The numbers in the job of these ranks of the group.

        >>> Membership("2-5", 0, 2, (2, 5)).in_job([1])
        (5,)
        """
        known = dict(enumerate(self.ranks))
        return tuple(known.get(rank, rank) for rank in ranks)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in the job of all ranks of the group."""
        return self.in_job(range(self.world))

    def in_group(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The numbers in the group of these ranks of the job; others are left out."""
        numbers = self.numbers
        return tuple(numbers.index(rank) for rank in ranks if rank in numbers)

    def explained(self, ranks: Collection[int]) -> str:
        """The numbers in the job, as a clause, of ranks with others in the group.

        >>> Membership("2-5", 0, 2, (2, 5)).explained([1])
        '; rank 1 of this group is rank 5 of the job'
        """
        numbers = self.in_job(ranks)
        if numbers == tuple(ranks):
            return ""
        names = listed(ranks)
        return f"; rank {names} of this group is rank {listed(numbers)} of the job"

    def beside(self, name: str) -> Membership:
        """The same ranks by another name, to meet under for another purpose."""
        return self._replace(name=f"{self.name}/{name}")

    def on_host(self, ranks_per_host: int) -> Membership:
        """The ranks of this rank's host; ranks are numbered host after host."""
        host, place = divmod(self.rank, ranks_per_host)
        first = self.rank - place
        ranks = range(first, first + ranks_per_host)
        return self._some(f"/host {host}", place, ranks)

    def across_hosts(self, ranks_per_host: int) -> Membership:
        """The ranks that have this rank's place on their hosts, host by host."""
        host, place = divmod(self.rank, ranks_per_host)
        ranks = range(place, self.world, ranks_per_host)
        return self._some(f"/place {place}", host, ranks)

    def going_on(self, ranks: Sequence[int]) -> Membership:
        """The next epoch, of these ranks of this one.

        It has no name within the old one: once all old ranks have left, all keys there
        are deleted.
        """
        world = len(ranks)
        return self._some(f", {world} go on", ranks.index(self.rank), ranks)

    def _some(self, suffix: str, rank: int, ranks: Sequence[int]) -> Membership:
        return Membership(f"{self.name}{suffix}", rank, len(ranks), self.in_job(ranks))

    def agree(
        self,
        own: Any,
        decide: Callable[[Mapping[int, Any]], Verdict],
        timeout: timedelta,
        *,
        what: str = "attach",
        due: Collection[int] | None = None,
        look: Look = lambda absent, found: False,
        is_partial: bool = False,
    ) -> Verdict:
        """Exchanges values; returns ``decide(values by rank)``, the same on all ranks.

        ``own`` is this rank's value, which has a JSON form. With None another thread
        posts the value. Ranks wait for the ranks in ``due`` (None: all), for
        ``timeout`` at most. ``look`` is called now and then, and ends the wait if no
        absent rank will come. Raises ``RankFailed`` with the ranks that have not come.
        If the meeting ``is_partial``, ``decide`` is called without their values
        instead. If ``decide`` raises, it does so on all ranks.
        """
        if self.world == 1:
            return decide({self.rank: own})
        due = range(self.world) if due is None else sorted(due)
        values = self._values(own, due, timeout, what, look)
        absent = tuple(rank for rank in due if rank not in values)
        if absent and not is_partial:
            time.sleep(_LINGER_S)
            raise _did_not_come(absent, self, what, timeout)
        try:
            return decide(values)
        except RanksDiffer:
            self.linger()
            raise

    def _values(
        self, own: Any, due: Sequence[int], timeout: timedelta, what: str, look: Look
    ) -> dict[int, Any]:
        """The values that count in a meeting of the ranks ``due``."""
        notes = {rank: _note(rank) for rank in due}
        end_s = time.monotonic() + timeout.total_seconds()
        found: dict[int, Any] = {}
        is_over = False

        # A background thread waits for values in the store (``hold``). This thread
        # calls ``look`` meanwhile, even if the store is silent.
        def watch() -> None:
            nonlocal is_over
            absent = [rank for rank in due if rank not in found]
            is_over |= bool(look(absent, dict(found)))

        def hold(store: Any) -> dict[int, Any]:
            if own is not None:
                self._post(own, store)
            looked_s = time.monotonic()
            absent = deque(due)
            while not (is_whole := store.check([*notes.values()])):
                is_last = is_over or time.monotonic() > end_s
                # one after another, as each question to a far store takes long
                for rank in [*absent][: None if is_last else 1]:
                    absent.rotate(-1)
                    if store.check([notes[rank]]):
                        found[rank] = json.loads(store.get(notes[rank]))
                        absent.remove(rank)
                if is_last:
                    break
                if time.monotonic() > looked_s + _LOOK_S:
                    looked_s = time.monotonic()
                    if store.check([_CAME]):
                        break
                time.sleep(POLL_S)
            return _values_of(due if is_whole else sorted(found), store)

        return self.ask(hold, timeout, what, watch)

    def post(self, value: Any) -> None:
        """Leaves this rank's value in a meeting without waiting for the others.

        Its first value counts.
        """
        self.ask(partial(self._post, value), _AT_ONCE)

    def _post(self, value: Any, store: Any) -> None:
        store.compare_set(_note(self.rank), "", json.dumps(value))

    def linger(self) -> None:
        """Waits until all ranks are about to raise, for a second at most.

        Each rank calls it before it raises an error that all ranks raise: its process
        may hold the store, in which others have yet to read the error.
        """
        if self.world > 1:
            wait([in_background(self._until_all_heard)], _LINGER_S)

    def _until_all_heard(self) -> None:
        store = own_store(self.name)
        keys = [f"heard/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], "")
        missing_keys(store, keys, _LINGER_S)

    def ask(
        self,
        question: Callable[[Any], Verdict],
        timeout: timedelta,
        what: str = "attach",
        watch: Callable[[], object] = lambda: None,
    ) -> Verdict:
        """The result of ``question(store)``, with a connection of its own to the store.

        Meanwhile ``watch`` is called from time to time, whether the store answers or
        not. Only a store that could be connected to within ``timeout`` has more time.
        """
        connecting = in_background(lambda: own_store(self.name))
        asked = in_background(lambda: question(connecting.result()))
        end_s = time.monotonic() + timeout.total_seconds()
        try:
            while not wait([asked], _LOOK_S).done:
                if time.monotonic() > end_s + EXTRA_S * connecting.done():
                    break
                watch()
            return asked.result(0)
        except GradwireError:
            raise
        except (dist.DistError, TimeoutError) as error:
            first, _, _ = str(error).partition("\n")
            silent = f"gave no answer within {timeout} and more"
            how = f"is lost ({first})" if first else silent
            ranks = (0,) if self.name.split("-")[0] == "0" else ()
            raise RankFailed(
                f"{what} cannot be finished: the job's store, where ranks meet, {how}; "
                "it is lost or stopped with the process that holds it: rank 0 of the "
                "job, or the agent of torchrun that started it; start the job again",
                ranks=ranks,
                exit_code=ExitCode.RANK_LOST if ranks else ExitCode.UNAVAILABLE,
            ) from error


_CAME = f"{MEETING}/came"


def _values_of(ranks: Sequence[int], store: Any) -> dict[int, Any]:
    """The values that count, by rank; ``ranks`` have come, as far as this rank knows.

    The first rank that writes its list of ranks decides for all, also for later ranks.
    """
    ranks = json.loads(store.compare_set(_CAME, "", json.dumps([*ranks])))
    texts = store.multi_get([*map(_note, ranks)]) if ranks else []
    return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}


def _note(rank: int) -> str:
    return f"{MEETING}/note/{rank}"


def _did_not_come(
    absent: tuple[int, ...], who: Membership, what: str, timeout: timedelta
) -> RankFailed:
    return RankFailed(
        f"{what} cannot be finished: rank {listed(absent)} of {who.world} did not call "
        f"it within {timeout}{who.explained(absent)}; all ranks of the group must call "
        f"{what}, and share one store, such as gw.FailurePolicy(store=)",
        ranks=who.in_job(absent),
    )


@dataclass
class Run:
    """The ranks that train together now, as a handle knows them.

    Attributes:
        name: A name that all of these ranks know, and no other run has.
        group: Their process group; None without one.
        num_loads: The checkpoints that they have loaded.
        has_changed: Whether these are other ranks than at attach.
        left: The ranks that were lost, for ``stats()``.
        joined: The ranks that came in, for ``stats()``.
    """

    name: str
    group: Group | None
    num_loads: int = 0
    has_changed: bool = False
    left: list[dict[str, Any]] = field(default_factory=list)
    joined: list[dict[str, Any]] = field(default_factory=list)

    def go_on(self, who: Membership, group: Group | None) -> None:
        """Has the ranks of ``who`` train on from here."""
        self.name = run_of(who)
        self.group = group
        self.num_loads = 0
        self.has_changed = True


def run_of(who: Membership) -> str:
    """A new name for the run of these ranks, the same on all of them."""
    drawn = token_hex(8)
    if who.world == 1:
        return drawn
    return who.ask(
        lambda store: str(store.compare_set("drawn", "", drawn), "ascii"), _AT_ONCE
    )


def join(group: Group | None, timeout: timedelta = DEFAULT_PATIENCE) -> Membership:
    """This rank's place in ``group`` (None: all ranks, or this process alone).

    Every rank must call this once in each attach: the number of calls is part of the
    name. Under torchrun the first call waits for the other ranks, for ``timeout`` at
    most.
    """
    if not dist.is_initialized():
        return ALONE
    group = group or dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group))
    # as torchcomms.init_device_mesh leaves one
    if len(ranks) > 1 and isinstance(store := root_store(), HashStore):
        given = f"a {type(store).__name__}, which no other process sees"
        remedy = (
            "make the group by dist.init_process_group(), or write failure="
            "gw.FailurePolicy(store=dist.TCPStore(host, port, is_master=rank == 0))"
        )
        raise invalid("the job's store", given, "one that all ranks share", remedy)
    return join_ranks(ranks, timeout)


def join_ranks(
    ranks: tuple[int, ...], timeout: timedelta = DEFAULT_PATIENCE
) -> Membership:
    """This rank's place among ``ranks``; see ``join``.

    ``ranks`` are numbers among all ranks.
    """
    if len(ranks) == 1:
        return ALONE._replace(ranks=ranks)
    name = "-".join(map(str, ranks))
    membership = Membership(name, ranks.index(dist.get_rank()), len(ranks), ranks)
    if not _JOINED[ranks] and "TORCHELASTIC_RESTART_COUNT" in os.environ:
        _ROLLS[ranks] = _rolled(membership, timeout)
    _JOINED[ranks] += 1
    return membership.beside(f"{_ROLLS.get(ranks, '')}{_JOINED[ranks]}")


def _rolled(who: Membership, timeout: timedelta) -> str:
    """A word that only these processes share, however often torchrun restarts the job.

    torchrun's agent keeps the store over restarts. So notes and alarms of dead
    processes are still there. The count of restarts does not tell them apart, as each
    host's agent counts its own restarts. So each process draws a random word, and
    writes a digest of all words that it sees. Only a living process can have seen the
    new word. If all digests are the same, all processes live.
    """
    token = token_hex(8)

    def roll(store: Any) -> str:
        words = [f"word/{rank}" for rank in range(who.world)]
        seen = [f"seen/{rank}" for rank in range(who.world)]
        store.set(words[who.rank], token)
        noted = ""
        end_s = time.monotonic() + timeout.total_seconds()
        while True:
            if store.check(words):
                text = b" ".join(store.multi_get(words))
                noted = hashlib.sha256(text).hexdigest()[:16]
                store.set(seen[who.rank], noted)
                if not _other_than(noted, seen, store):
                    return f"{noted}/"
            if time.monotonic() > end_s:
                silent = missing_keys(store, words, 0.0)
                absent = silent or _other_than(noted, seen, store)
                raise _did_not_come(absent, who, "attach", timeout)
            time.sleep(POLL_S)

    return who.ask(roll, timeout)


def _other_than(noted: str, seen: list[str], store: Any) -> tuple[int, ...]:
    """The ranks that have not written the digest that this rank has ``noted``."""
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
