"""Blame: which ranks caused a failed step, from signs of life and the roll call.

A parted network shows as one failure, and not as one dead rank after another. On each
side ranks reach each other and no rank beyond, and the error names the ranks of a side.

If one of gradwire's errors ends a script, the exit code says the cause. Python itself
ends with 1 for any error. By the code a launcher can start the job again, start it on
other machines, or give up (`errors.ExitCode`).
"""

import os
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any
from weakref import WeakSet

from ...errors import ExitCode, GradwireError, LoopMistake, RankFailed
from ..transport.wire import AMONG_SHARDS, in_background
from .alarm import Alarm, listed, said
from .membership import Membership
from .pulse import PATIENCE_S, STORE_PATIENCE_S, Pulse
from .roll_call import ASK_S, Reach

_ENDINGS = (Reach.ENDED, Reach.DETACHED, Reach.MUTE)
"""The answers to probes that explain the silence of a rank."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that says at which network interface gloo listens."""
CAUSES: WeakSet[Any] = WeakSet()
"""Objects whose ``cause_of`` may know a lost rank behind an error of torch's."""
IN_ATTACH = -1
"""The step of an alarm that was raised in ``attach``, before the first step."""


def blamed(pulse: Pulse | None, name: str, step: int, world: int) -> Alarm:
    """An alarm that names the ranks to blame for the failure of communication ``name``.

    It names no rank if all of them live and are level. Making it takes seconds, as
    signs of life come slowly.
    """
    if pulse is None:
        return _of_the_network(step)
    if silent := silence(pulse, step, world):
        return silent
    if name.endswith(AMONG_SHARDS):
        text = (
            "a rank with another shard of these layers is lost, and none with this one"
        )
        return Alarm((), step, text)
    if last := pulse.last_ranks():
        steps = pulse.local_steps()
        return Alarm(
            last, step, f"rank {listed(last)} of {world} did not get as far{steps}"
        )
    return _of_the_network(step)


def silence(pulse: Pulse, step: int, world: int) -> Alarm | None:
    """An alarm about ranks, or the store, without a sign of life for seconds.

    None if all show signs. While all ranks answer probes, the store has
    ``STORE_PATIENCE_S`` to answer. If the store was silent first, and all other ranks
    have ended since, this rank's own link is at fault.
    """
    end_s = time.monotonic() + STORE_PATIENCE_S
    while True:
        asking = in_background(pulse.roll_call.ask)
        silent, store_lost = pulse.silent_ranks()
        # without an answer to probes, signs alone count
        has_answered = wait([asking], 2 * ASK_S).done and not asking.exception()
        reach, announced = asking.result() if has_answered else ({}, b"")
        if announced:  # another rank has found out before
            return Alarm.decoded(announced, step)
        have_ended = world > 2 and {*reach.values()} == {Reach.ENDED}
        if store_lost and have_ended and pulse.mute_s >= PATIENCE_S:
            text = (
                f"rank {pulse.rank} of {world} was cut off, and all others have "
                "ended meanwhile"
            )
            return Alarm((pulse.rank,), step, text, ExitCode.NETWORK)
        is_slow = store_lost and not pulse.store_is_lost
        if not is_slow or (pulse.rank and reach.get(0) is not Reach.ANSWERS):
            break
        # The store may only be slow. But a rank whose process has ended is lost.
        if ended := tuple(rank for rank, how in reach.items() if how is Reach.ENDED):
            silent = ended
            store_lost = False
            break
        if Reach.CUT in reach.values() or time.monotonic() >= end_s:
            break
    left = dict.fromkeys(pulse.detached() & reach.keys(), Reach.DETACHED)
    alarm = alarm_of(
        pulse.rank, world, step, silent, {**reach, **left}, store_lost=store_lost
    )
    return alarm and alarm._replace(text=f"{alarm.text}{pulse.local_steps()}")


def _of_the_network(step: int) -> Alarm:
    text = "no rank is lost, but the network is: all ranks answer elsewhere"
    return Alarm((), step, text, ExitCode.NETWORK)


def alarm_of(
    rank: int,
    world: int,
    step: int,
    silent: tuple[int, ...],
    reach: Mapping[int, Reach],
    *,
    store_lost: bool,
) -> Alarm | None:
    """The alarm of ``rank``, which reads no sign of life of ``silent`` ranks.

    None if there are none. ``reach`` has the other ranks' answers to probes.
    ``store_lost`` says that the store does not answer. Then ``silent`` is rank 0, which
    holds the store in most jobs.
    """
    cut = tuple(other for other, how in reach.items() if how is Reach.CUT)
    near = tuple(
        sorted((rank, *(r for r, how in reach.items() if how is Reach.ANSWERS)))
    )
    if cut and (store_lost or set(cut) & set(silent)):
        # This rank cannot connect to some ranks, and that explains all the rest.
        if len(cut) == world - 1 > 1:
            text = (
                f"rank {rank} of {world} is cut off: no connection reaches any other "
                "rank"
            )
            return Alarm((rank,), step, text, ExitCode.NETWORK)
        lost = tuple(sorted({*cut, *(() if store_lost else silent)}.difference(near)))
        text = (
            f"the network is parted: ranks {listed(near)} of {world} reach each "
            f"other, and no connection reaches ranks {listed(cut)}"
            if len(cut) > 1
            else f"no connection reaches rank {listed(cut)} of {world}: its host or "
            "its link is down"
        )
        return Alarm(lost, step, text, ExitCode.NETWORK)
    if store_lost and (rank == 0 or reach.get(0) is Reach.ANSWERS):
        text = f"the job's store stopped answering, though rank 0 of {world} does"
        return Alarm((), step, text, ExitCode.UNAVAILABLE)
    if not silent:
        return None
    text = f"rank {listed(silent)} of {world} stopped answering"
    if store_lost:
        text += ", and the job's store with it"
    ends = {reach.get(other, Reach.UNKNOWN) for other in silent}
    if len(ends) == 1 and (end := ends.pop()) in _ENDINGS:
        text += f": {end.value}"
    return Alarm(silent, step, text)


def failure_of(alarm: Alarm, who: Membership, how: str) -> RankFailed:
    """The error by which an alarm ends this rank's run.

    ``how`` says how the rank came to know of it. The error's ``ranks`` are numbers in
    the job, and the alarm's are numbers in the group.
    """
    what = "attach" if alarm.step == IN_ATTACH else f"step {alarm.step}"
    is_mistake = alarm.code == ExitCode.MISTAKE
    last_words = "restart the job from its last checkpoint"
    if _INTERFACE in alarm.text:
        last_words = "a restart alone ends in the same error"
    if is_mistake:
        last_words = "change the training loop: a restart alone ends in the same error"
    return (LoopMistake if is_mistake else RankFailed)(
        f"{what} cannot be finished: {alarm.text} (noticed by rank {who.rank}; {how})"
        f"{who.explained(alarm.ranks)}; {last_words}",
        ranks=(*who.in_job(alarm.ranks), *alarm.beyond),
        step=alarm.step,
        exit_code=alarm.code,
    )


def loopback_name() -> str:
    """The remedy if this host's name means the loopback address; else "".

    Debian sets up hosts like this. gloo listens at the address of the host's name,
    unless an interface is named.
    """
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    if _INTERFACE in os.environ or not address.startswith("127."):
        return ""
    return (
        f"; this host's name resolves to {address}, which no other host can reach: if "
        f"ranks run on several hosts, set {_INTERFACE} on each to the interface that "
        "reaches the others (gradwire doctor names it)"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error, with its type unless it is gradwire's."""
    text = str(error) if isinstance(error, GradwireError) else said(error)
    return text.partition("\n")[0]


def leave_by_cause() -> None:
    """Has one of gradwire's errors end this process with the exit code of its cause.

    ``sys.excepthook`` does it. A hook that is there already is called first.
    """
    if getattr(sys.excepthook, "__module__", None) == __name__:
        return
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        if isinstance(error, GradwireError):
            # from a hook, this is how the process ends
            raise SystemExit(int(error.exit_code))
        for one in CAUSES:
            if cause := one.cause_of(error):
                hook(type(cause), cause, None)

    sys.excepthook = hook
