"""Striking: how ``bench faults`` has a fault happen on one rank, at a verb or at a
named point.

Nothing in the runtime knows of faults. One at a verb strikes in steps around the
message's own, which sees every verb before and after it is carried out. One at a named
point strikes where the training loop is, or in the place of a function that the runtime
calls there.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from os import _exit as leave_at_once
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from gradwire.contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Compute,
    Recv,
    ReduceScatter,
    Send,
    Steps,
    rewritten,
)
from gradwire.runtime.local_steps import mail
from gradwire.runtime.transport import wire

from .accidents import FLIP_ON_THE_WAY, OF_BYTES, WITH_HELP, Accident

_EXTRA_BYTES = 8


class InjectedError(RuntimeError):
    """The error of a victim that raises."""


class LoopLeft(BaseException):
    """A victim's training loop ends before those of the others."""


def _signal_of(kind: str) -> signal.Signals | None:
    """The signal that a victim sends itself for this kind of fault; None for other
    faults.
    """
    if kind.startswith("kill") or kind == "resume":
        return signal.SIGKILL
    if kind == "terminate":
        return signal.SIGTERM
    if kind.startswith(("stop", "pause")):
        return signal.SIGSTOP
    return None


class Striker:
    """The fault of a trial on one of its victims, which strikes once.

    ``announce`` is called with the time (``time.monotonic()``) just before.
    """

    def __init__(self, accident: Accident, announce: Callable[[float], None]) -> None:
        self.accident = accident
        self._announce = announce
        self.is_over = False

    def __call__(self) -> None:
        if self.is_over:
            return
        self.note()
        kind = self.accident.kind
        # Help from outside has done it by now, and what is loaded is the rank's own
        # doing.
        if kind in WITH_HELP or kind == "other step":
            return
        number = _signal_of(kind)
        if number is not None:
            os.kill(os.getpid(), number)
        elif kind == "exit":
            leave_at_once(1)
        elif kind == "disk full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif kind == "straggle":
            time.sleep(self.accident.timeout_s / 2)
        elif kind == "return":
            raise LoopLeft
        else:
            raise InjectedError("the fault of this trial")

    def note(self) -> None:
        """Tells that the fault strikes now."""
        self.is_over = True
        self._announce(time.monotonic())

    def at(self, point: str, step: int | None = None) -> None:
        """Strikes if the fault is at this point, and in this step."""
        if self.accident.point == point and step in (None, self.accident.step):
            self()

    def around(self, module: Any, name: str) -> None:
        """Has the fault strike where a module calls one of its functions."""
        original = getattr(module, name)
        when = self.accident.when

        def struck(*args: Any, **named: Any) -> Any:
            if when == "before":
                self()
            result = original(*args, **named)
            self()
            return result

        setattr(module, name, struck)

    def at_message(self, kind: type, place: int) -> None:
        """Has the fault strike before or while this rank sends a message.

        After it is before the next one. While it is sent, its head has been sent.

        Args:
            kind: The class of the messages of local steps that count.
            place: How many of them are sent before.
        """
        parts_of = mail._parts
        pieces_of = mail._pieces
        when = self.accident.when
        left = place + (when == "after")
        sender = 0

        def struck_parts(message: Any) -> Any:
            nonlocal left, sender
            left -= isinstance(message, kind)
            if left < 0 and when == "during":
                sender = get_ident()
            elif left < 0:
                self()
            return parts_of(message)

        def pieces(parts: Any) -> Any:
            if sender == get_ident():
                self()
            return pieces_of(parts)

        mail._parts = struck_parts
        mail._pieces = pieces


class StruckSteps:
    """The steps of one rank's messages; the fault strikes at a verb of one message."""

    def __init__(self, striker: Striker) -> None:
        self._striker = striker
        self._counts: dict[int, int] = {}
        """How many verbs of each message the fault can strike at, as step 0 has
        shown.
        """

    def around(self, message: Any) -> None:
        """Replaces a message's steps by steps in which the fault can strike."""
        original = message.steps
        index = message.index
        step = -1

        def steps(*args: Any, **named: Any) -> Steps[Any]:
            nonlocal step
            step += 1  # only now: steps may be made and never begin
            return (yield from self._watched(original(*args, **named), index, step))

        message.steps = steps

    def _watched(self, steps: Steps[Any], index: int, step: int) -> Steps[Any]:
        target = self._target(index) if step == self._striker.accident.step else None
        place = -1

        def each(asked: Any) -> Steps[Any]:
            nonlocal place
            suits = any(map(self._suits, _verbs(asked)))
            place += suits
            if suits and place == target and not self._striker.is_over:
                return (yield from self._strike(asked))
            return (yield asked)

        value = yield from rewritten(steps, each)
        if step == 0:
            self._counts[index] = place + 1
        if target is not None and not self._is_of_bytes:
            # at the end, where this step has fewer verbs than the first
            self._striker()
        return value

    @property
    def _is_of_bytes(self) -> bool:
        return self._striker.accident.kind in OF_BYTES

    def _target(self, index: int) -> int | None:
        """The place of the verb to strike at in a message; None where it is another
        message's.
        """
        accident = self._striker.accident
        hit = sorted(i for i, count in self._counts.items() if count)
        if not hit or index != hit[int(accident.message * len(hit))]:
            return None
        return int(accident.verb * self._counts[index])

    def _suits(self, verb: Any) -> bool:
        """Whether the fault can strike at a verb."""
        match self._striker.accident.kind:
            case "flip sent":
                buf = _sent(verb)
            case "flip received":
                buf = _received(verb)
            case kind if kind == FLIP_ON_THE_WAY:
                buf = (
                    verb.buf if isinstance(verb, Send | AllGather | AllToAll) else None
                )
            case "size":
                buf = (
                    verb.buf
                    if isinstance(verb, Send | Recv | AllReduce | AllGather)
                    else None
                )
            case _:
                return not isinstance(verb, Compute)
        return buf is not None and buf.numel() > 0

    def _strike(self, asked: Any) -> Steps[Any]:
        accident = self._striker.accident
        verbs = _verbs(asked)
        if self._is_of_bytes:
            self._striker.note()
            return (yield from self._spoil(asked, verbs))
        if accident.when == "before":
            self._striker()
        # ranks read each other's rooms only for a verb that is asked for alone
        is_lent = isinstance(asked, AllToAll) and asked.room is not None
        if accident.when == "during" and not is_lent:
            results = yield (*verbs, Compute("fault", self._striker))
            if isinstance(asked, tuple):
                return results[:-1]
            return results[0]
        results = yield asked
        self._striker()
        return results

    def _spoil(self, asked: Any, verbs: tuple[Any, ...]) -> Steps[Any]:
        """Has verbs carried out with other bytes than the exchange has asked for."""
        kind = self._striker.accident.kind
        bit = self._striker.accident.bit
        at = next(place for place, verb in enumerate(verbs) if self._suits(verb))
        spoilt = list(verbs)
        verb = verbs[at]
        if kind == FLIP_ON_THE_WAY:
            flip_on_the_way(verb, bit)
        elif kind == "size":
            spoilt[at] = longer(verb)
        elif kind == "flip sent" and isinstance(verb, AllReduce | Broadcast):
            flip(verb.buf, bit)
        elif kind == "flip sent":
            # what is kept here stays as it was
            spoilt[at] = replace(verb, buf=verb.buf.clone())
            flip(spoilt[at].buf, bit)
        results = yield tuple(spoilt) if isinstance(asked, tuple) else spoilt[0]
        buf = _received(verb)
        if kind == "flip received" and buf is not None:
            flip(buf, bit)
        elif kind == "size" and not isinstance(verb, Send):
            numel = verb.buf.numel()
            target, rows = (
                (verb.out, spoilt[at].out)
                if isinstance(verb, AllGather)
                else (verb.buf, spoilt[at].buf)
            )
            extra = _EXTRA_BYTES // verb.buf.element_size()
            target.view(-1, numel).copy_(rows.view(-1, numel + extra)[:, :numel])
        return results


def _verbs(asked: Any) -> tuple[Any, ...]:
    if isinstance(asked, tuple):
        return asked
    return (asked,)


def _sent(verb: Any) -> Tensor | None:
    return None if isinstance(verb, Compute | Recv) else verb.buf


def _received(verb: Any) -> Tensor | None:
    if isinstance(verb, AllGather | AllToAll | ReduceScatter):
        return verb.out
    return None if isinstance(verb, Compute | Send) else verb.buf


def flip(buf: Tensor, bit: float) -> None:
    """Flips one bit of a buffer; ``bit`` in [0, 1) says which of all.

    >>> buf = torch.zeros(2, dtype=torch.uint8)
    >>> flip(buf, 0.6)
    >>> buf
    tensor([0, 2], dtype=torch.uint8)
    """
    bytes_B = buf.view(torch.uint8)
    place = int(bit * bytes_B.numel() * 8)
    bytes_B[place // 8] ^= 1 << place % 8


def flip_on_the_way(target: Any, bit: float) -> None:
    """Has a bit flip in what a verb sends, behind its checksum.

    With checksums an all-gather is carried out as an all-to-all into its ``out``.
    """
    start = wire.start

    def spoilt(verb: Any, channel: Any, *, straight: bool = False) -> Any:
        if verb is target or getattr(verb, "out", None) is getattr(target, "out", verb):
            verb = replace(verb, buf=verb.buf.clone())
            flip(verb.buf, bit)
        return start(verb, channel, straight=straight)

    wire.start = spoilt


def longer(verb: Any) -> Any:
    """A verb that sends, or awaits, 8 bytes more of each rank."""
    buf = verb.buf
    grown = torch.cat([buf, buf.new_zeros(_EXTRA_BYTES // buf.element_size())])
    if not isinstance(verb, AllGather):
        return replace(verb, buf=grown)
    out = buf.new_empty(verb.out.numel() // buf.numel() * grown.numel())
    return replace(verb, buf=grown, out=out)
