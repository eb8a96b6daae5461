"""Joint calls: all ranks of a group load a state, or gather theirs, or none does.

Ranks that train on with states of different steps, or some with a state and some
without, would drift apart; where a state decides what is sent (the stage of a warm-up,
who leads a step), they would wait for each other until their timeout. So each rank
announces in the job's store which state it is about to load or to give, or that
it cannot, and goes on when all have done so. Nobody waits there for a rank that has
refused, nor for one that has begun the next step instead.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...contract.verbs import AllReduce
from ...errors import RankFailed
from ..agreement.fingerprint import (
    first_difference,
    refusals,
    refuse_differences,
    refuse_if_one_did,
    refusing,
)
from ..engine.engine import Engine
from ..engine.plain import packed, read_packed, receive, send
from ..liveness.alarm import listed
from ..liveness.membership import Membership
from ..liveness.pulse import PATIENCE_S, STORE_PATIENCE_S
from ..transport.wire import carry_out, in_background, open_channels
from .table import described

SILENCE_S = STORE_PATIENCE_S
"""Seconds for which a rank that others wait for may show no sign of life, as reading a
checkpoint takes long.
"""
_LOOK_S = 0.5
"""Seconds between two looks for the others while states travel."""


class JointCall:
    """One call that this rank makes between two steps, as all others are to.

    ``call`` is its name in errors, such as ``load_state_dict()``, and ``done`` says in
    words what no rank does where one refuses.
    """

    def __init__(self, engine: Engine, call: str, done: str) -> None:
        engine.refuse_copy()
        engine.begin_call()
        self._engine = engine
        self._call = call
        self._done = done
        self._next_step = 0
        self._group, self._shards = (
            who.beside(f"call {engine.num_calls}")
            for who in (engine.who, engine.shards)
        )

    def refusing(self) -> AbstractContextManager[Any]:
        """Announces errors of the block, unless this rank's run has ended.

        In that case all ranks know it, and the store may be gone with its process.
        """
        return refusing(self._group, self._shards, unless=(RankFailed,))

    def agree(
        self,
        saved: Mapping[str, Any],
        shared: Mapping[str, str],
        *,
        strict: bool,
        next_step: int,
    ) -> None:
        """Returns when all ranks have made the call, with states that belong together.

        ``shared`` has the values of ``saved`` that are the same on all ranks, by their
        names. ``next_step`` is the step that would be run if nothing were loaded.
        Raises ``RanksDiffer`` if one refused or they differ, and ``RankFailed`` if one
        trains on instead or does not come.
        """
        self._engine.check()
        self._next_step = next_step
        alike = {"call": self._call, "strict": strict, **described(saved)}
        facts = {"alike": alike, "share": saved["share"], "of its share": shared}
        with refusing(self._shards):
            self._compare(self._group, facts, "rank")
        # Ranks with other shards are other groups, whose runs have names of their own.
        alike = {key: saved.get(key) for key in ("step", "local_step")}
        alike["call"] = self._call
        facts = {"alike": alike, "share": "", "of its share": {}}
        self._compare(self._shards, facts, "the rank of shard")

    def _compare(self, who: Membership, facts: Mapping[str, Any], kind: str) -> None:
        engine = self._engine
        call = self._call
        is_group = kind == "rank"
        refused = f"{kind} {{}} refused {call}, so nothing was {self._done} on any rank"
        # It takes so long to find silent ranks, and they must be known at the time-out.
        early_s = time.monotonic() + max(
            0.0, engine.timeout.total_seconds() - PATIENCE_S
        )

        def look(absent: Sequence[int], announced: Mapping[int, Any]) -> bool:
            engine.check()
            if is_group:  # of shards of other groups nothing is known
                self._refuse_to_wait_for(absent)
            if time.monotonic() > early_s:
                engine.refuse_silence(self._next_step)
            return bool(refusals(announced))

        def decide(announced: Mapping[int, Any]) -> None:
            absent = tuple(rank for rank in range(who.world) if rank not in announced)
            if is_group and not (who.rank or absent) and engine.num_calls > 1:
                # A rank that has come to this call has read all of the last one.
                engine.sweep(f"call {engine.num_calls - 1}")
            refuse_if_one_did(announced, refused)
            if absent:
                raise self._late(absent, kind, who.world)
            self._refuse_differences(announced, kind)

        try:
            who.agree(
                facts, decide, engine.timeout, what=call, look=look, is_partial=True
            )
        except RankFailed as error:
            if error.step >= 0:
                raise  # all know it
            cause = error.__cause__ or error  # the store is lost, and perhaps no rank
            raise engine.unreachable(
                f"finish {call}", cause, self._next_step
            ) from cause

    def _refuse_differences(self, found: Mapping[int, Any], kind: str) -> None:
        """Raises ``RanksDiffer`` if ranks have different checkpoints."""
        how = "do not have the same checkpoint"
        remedy = (
            f"nothing was {self._done}: have every rank make the same call, with "
            "the state that it saved at the same step of the same run"
        )
        groups: dict[str, dict[int, Any]] = {}
        for rank, announced in found.items():
            groups.setdefault("alike", {})[rank] = announced["alike"]
            # Ranks at other places of their hosts exchange with other ranks.
            same_share = groups.setdefault(f"share {announced['share']}", {})
            same_share[rank] = announced["of its share"]
        for notes in groups.values():
            refuse_differences(
                notes, kind, how, remedy, first_difference, names_all=True
            )

    def _late(self, absent: tuple[int, ...], kind: str, world: int) -> BaseException:
        """The error about ranks that did not come in time.

        A rank that has begun the call may only be slow. It is named where all that are
        absent have.
        """
        engine = self._engine
        is_group = kind == "rank"
        signs = engine.signs() if is_group else []
        calls = {rank: signs[rank].place.num_calls for rank in absent if signs}
        away = tuple(rank for rank in absent if calls.get(rank, 0) < engine.num_calls)
        how = "did not call" if away else "was not ready for"
        text = f"{kind} {listed(away or absent)} of {world} {how} {self._call}"
        ranks = (away or absent) if is_group else ()
        return self._lose(ranks, f"{text} within {engine.timeout}")

    def _refuse_to_wait_for(self, absent: Sequence[int]) -> None:
        """Raises if one of these ranks is gone, or began a step without this load."""
        signs = self._engine.signs()
        for rank in absent if signs else ():
            place = signs[rank].place
            at = (self._next_step, self._engine.num_calls - 1)
            if place.launched and (place.step, place.num_calls) == at:
                raise self._lose(
                    (rank,),
                    f"rank {rank} of {self._engine.world} began step {self._next_step} "
                    f"without {self._call}, which rank {self._engine.rank} has called",
                )
            if signs[rank].still_s > SILENCE_S:
                raise self._lose(
                    (rank,),
                    f"rank {rank} of {self._engine.world} stopped answering before "
                    f"{self._call}",
                )

    def _lose(self, ranks: tuple[int, ...], text: str) -> BaseException:
        how = (
            f"all ranks of the group must call {self._call}, between the same two steps"
        )
        return self._engine.lose(ranks, self._next_step, text, how)

    def gather(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The states of all ranks on rank 0, in rank order, in host memory.

        None on others.

        To be called after ``agree``. States travel to rank 0 one after another, on a
        channel of their own, so that beside what it keeps it needs the memory of one. A
        rank that stops answering meanwhile is named on all.
        """
        who = self._group
        engine = self._engine
        if who.world == 1:
            return [state]
        opened = []

        def travel() -> list[dict[str, Any]]:
            # The last rank waits for its turn while all others send theirs.
            opened.extend(open_channels(*who[:3], 1, engine.timeout * who.world))
            states = [state]
            if who.rank:
                send(packed(state), 0, opened[0])
            else:
                states += [
                    read_packed(receive(r, opened[0])) for r in range(1, who.world)
                ]
            # nobody trains on before all are there
            carry_out([AllReduce(torch.zeros(1))], opened)
            return [] if who.rank else states

        travelling = in_background(travel)
        try:
            while not wait([travelling], _LOOK_S).done:
                engine.check()
                self._refuse_to_wait_for(
                    [rank for rank in range(who.world) if rank != who.rank]
                )
            states: list[dict[str, Any]] = travelling.result()
            return states
        except RankFailed:
            raise
        # Also for a state that cannot be sent: others wait for it.
        except Exception as error:
            raise engine.unreachable(
                f"finish {self._call}", error, self._next_step
            ) from error
        finally:
            for channel in () if travelling.done() else opened:
                channel.abort()
