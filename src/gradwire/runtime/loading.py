"""Loading: all ranks of a group load a state, or none does; they agree before any of them loads.

Ranks that train on with states of different steps, or some with a state and some without, would
drift apart; where a state decides what is sent (the stage of a warm-up, who leads a step), they
would wait for each other until their timeout. So each rank tells the others in the job's store what
it is about to load, or that it cannot, and goes on when all have done so. Nobody waits there for a
rank that has refused, nor for one that has begun the next step instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RankFailed, RanksDiffer
from .engine import Engine
from .fingerprint import post_refusal, refusal_in
from .membership import Membership
from .pulse import STORE_PATIENCE_S

CALL = "load_state_dict()"
SILENCE_S = STORE_PATIENCE_S
"""Seconds for which a rank that others wait for may show no sign of life, as reading a checkpoint
takes long."""


class Loading:
    """One call of ``load_state_dict``, on this rank and on those that are to make it too."""

    def __init__(self, engine: Engine) -> None:
        engine.begin_load()
        self._engine, self._next_step = engine, 0
        self._beats: dict[int, tuple[int, float]] = {}
        self._group, self._shards = (
            who.beside(f"load {engine.num_loads}") for who in (engine.who, engine.shards)
        )

    def refuse(self, error: Exception) -> None:
        """Tells the other ranks that this one does not load, unless its run has ended anyway.

        Then all have been told, and the store may be gone with the process that held it.
        """
        if isinstance(error, RankFailed):
            return
        post_refusal(self._group, error)
        post_refusal(self._shards, error)

    def agree(self, saved: Mapping[str, Any], *, strict: bool, next_step: int) -> None:
        """Returns when all ranks are about to load states that belong together.

        ``next_step`` is the step that would be run if nothing were loaded. Raises ``RanksDiffer``
        if one refused or they differ, and ``RankFailed`` if one trains on instead or does not come.
        """
        self._engine.check()
        self._next_step = next_step
        own: dict[str, Any] = {key: saved[key] for key in ("step", "run", "saved_by")}
        own["local_step"] = saved.get("local_step")
        own["strict"], own["is of a share"] = strict, bool(saved["share"])
        own["fields"] = {
            f"{kind} {name}": sorted(fields)
            for kind, key in (("parameter", "params"), ("message", "messages"))
            for name, fields in saved[key].items()
        }
        try:
            self._compare(self._group, own, "rank")
        except Exception as error:
            post_refusal(self._shards, error)
            raise
        # Ranks with other shards are other groups, whose runs have names of their own.
        self._compare(self._shards, {"step": saved["step"]}, "the rank of shard")

    def _compare(self, who: Membership, own: Mapping[str, Any], kind: str) -> None:
        if who.world == 1:
            return

        def look(absent: Sequence[int], found: Mapping[int, str]) -> None:
            self._engine.check()
            _refuse_if_one_did(found, kind)
            if kind == "rank":
                self._refuse_to_wait_for(absent)  # of shards of other groups nothing is known

        timeout = self._engine.timeout
        try:
            notes = who.share(json.dumps(own), timeout, what=CALL, look=look)
        except RankFailed as error:
            if error.step >= 0:
                raise  # all were told
            if error.__cause__ is not None:  # the store is lost, and nobody can be told
                raise RankFailed(
                    str(error), ranks=error.ranks, step=self._next_step
                ) from error.__cause__
            absent = ", ".join(map(str, error.ranks))
            text = f"{kind} {absent} of {who.world} did not call {CALL} within {timeout}"
            raise self._lose(error.ranks if kind == "rank" else (), text) from error
        found = dict(enumerate(notes))
        _refuse_if_one_did(found, kind)
        told = [json.loads(note) for note in notes]
        for other, theirs in enumerate(told):
            if difference := _difference(told[0], theirs):
                raise RanksDiffer(
                    f"{kind} 0 and {kind} {other} do not load the same checkpoint: {difference}; "
                    "nothing was loaded: give every rank the state_dict that it saved at the same "
                    "step of the same run"
                )

    def _refuse_to_wait_for(self, absent: Sequence[int]) -> None:
        """Raises if one of these ranks is gone, or has begun the next step without this load."""
        signs, now_s = self._engine.signs(), time.monotonic()
        for rank in absent if signs else ():
            beat, place = signs[rank]
            seen, since_s = self._beats.get(rank, (-1, now_s))
            self._beats[rank] = (beat, now_s if beat != seen else since_s)
            at = (self._next_step, self._engine.num_loads - 1)
            if place.launched and (place.step, place.num_loads) == at:
                raise self._lose(
                    (rank,),
                    f"rank {rank} of {self._engine.world} began step {self._next_step} without "
                    f"{CALL}, which rank {self._engine.rank} has called",
                )
            if now_s - self._beats[rank][1] > SILENCE_S:
                text = f"rank {rank} of {self._engine.world} stopped answering before {CALL}"
                raise self._lose((rank,), text)

    def _lose(self, ranks: tuple[int, ...], text: str) -> BaseException:
        how = f"all ranks of the group must call {CALL}, between the same two steps"
        return self._engine.lose(ranks, self._next_step, text, how)


def _refuse_if_one_did(notes: Mapping[int, str], kind: str) -> None:
    for rank, note in notes.items():
        if refusal := refusal_in(json.loads(note)):
            raise RanksDiffer(
                f"{kind} {rank} refused to load a state, so no rank loads one: {refusal}"
            )


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for key, value in one.items():
        if key != "fields" and value != other[key]:
            return f"{key} is {value} against {other[key]}"
    ours, theirs = one.get("fields", {}), other.get("fields", {})
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return f"of the {name} one has {ours.get(name)}, the other {theirs.get(name)}"
    return None
