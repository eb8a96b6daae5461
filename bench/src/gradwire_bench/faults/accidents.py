"""Accidents: what ``bench faults`` does to ranks that train, and where; all drawn from
a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from gradwire.contract.registry import names

NUM_STEPS = 5
SAVE_AFTER = 1
LOAD_AFTER = 2
"""The steps after which all ranks save a state, and load it again."""

DDP = "ddp"
OVERLAP = "overlap"
HOSTS = "hosts"
FSDP = "fsdp"
COLLECTIVES = tuple(name for name in names("collective") if name != "allreduce")
SHRINK = "shrink"
DDP_SHRINK = "ddp shrink"
HOSTS_SHRINK = "hosts shrink"
HSDP_SHRINK = "hsdp shrink"
IN_PAIRS = (HOSTS_SHRINK, HSDP_SHRINK)
"""Ways in which two ranks leave together: a host, or a replica."""
COORDINATOR = "coordinator"
COORDINATOR_SHRINK = "coordinator shrink"
COORDINATED = (COORDINATOR, COORDINATOR_SHRINK)
SERVER = "server"
SHRINKING = (SHRINK, DDP_SHRINK, *IN_PAIRS, COORDINATOR_SHRINK)
LOCAL = "local steps"
"""Local steps with a quorum, whose ranks train on without a lost one."""
WAYS = (
    *("plain", DDP, OVERLAP, HOSTS, FSDP, COORDINATOR, SERVER),
    *(*SHRINKING, *COLLECTIVES),
)
"""How models are trained: a plain module, DDP, a plan that overlaps the next forward
pass, hosts of two ranks, two replicas of two shards, a plan with a coordinator, a last
rank that only serves; a plain module, DDP, hosts, replicas of shards and a coordinator
that go on without a lost rank; and a plain module by each collective.
"""
SURVIVED = ("kill", "stop", "exit", "kill two")
"""Faults without whose victims ranks go on."""

IN_ATTACH = ("rendezvous", "agree", "connect", "broadcast")
"""Points in attach: before ranks meet, where they agree, where they connect and where
parameters are broadcast.
"""
IN_TRAINING = ("step", "settle", "save", "load", "detach")
"""Points between two steps: before a step, and before calls of the handle."""

PAUSES = {"pause": 0.5, "pause long": 2.0}
"""Seconds, in time-outs, after which a stopped process goes on."""
PAYLOADS = ("flip sent", "flip received", "size")
"""Faults of a verb's bytes."""
FLIP_ON_THE_WAY = "flip on the way"
"""A bit flips behind the checksum of what a rank sends, where ranks attach with
checksums.
"""
OF_BYTES = (*PAYLOADS, FLIP_ON_THE_WAY)
HEALED = "partition healed"
"""A network that falls into two, for 1 to 60 s."""
PARTITIONS = {"partition 2-2": 4, "partition 2-3": 5, HEALED: 5}
"""Networks that fall into two, and how many ranks they have."""
FLAPS = {"flap 1 s": 1.0, "flap 5 s": 5.0, "flap 15 s": 15.0}
"""Seconds for which a rank's link is down."""
LINKS = ("link down", *FLAPS, "one way", "1 Mbit", *PARTITIONS)
"""Faults of the links of shaped hosts, one for each rank."""
BENIGN = ("straggle", "pause", "flap 1 s", "1 Mbit")
"""Faults that end, or are bridged, before the time-out: nobody may notice."""
WHOLE = (*BENIGN, *OF_BYTES, *LINKS, "kill store", "other step")
"""Faults that leave every rank's process alive."""
WITH_HELP = (*LINKS, "kill store")
"""Faults that another process carries out while the rank waits for it."""
KINDS = (
    *("kill", "stop", "raise", "exit", "terminate", "return", "kill two", "kill store"),
    *("straggle", "pause", "pause long", "disk full", "resume", "other step"),
    *OF_BYTES,
    *(kind for kind in LINKS if kind != HEALED),
)
OWNER = "kill owner"
"""A rank ends before, while or after it sends a merge to one of the others."""
REJOIN = "kill and rejoin"
"""A rank ends, and another process comes in."""
NEWCOMER = "kill newcomer"
"""A process that comes in ends on its way, or soon after."""
LOCAL_KINDS = (
    *("kill", "stop", "exit", "kill two", OWNER, "kill store", "pause", "pause long"),
    *("straggle", *LINKS, REJOIN, NEWCOMER),
)
"""Faults that strike under local steps."""
_NUM_VICTIMS = {"kill two": 2, "resume": 4, **dict.fromkeys(PARTITIONS, 2)}
_WHENS = ("before", "during", "after")
_NOT_SHARDED = (*OF_BYTES, *WITH_HELP, "resume", "other step")
_NOT_SERVED = ("disk full", "resume", "other step", "return")
"""Faults of saved states, which servers refuse, and of a loop, which they have none of.
"""
_AT_POINTS: dict[str, Sequence[str]] = {
    "return": ("rendezvous", "step", "step", "step"),
    "disk full": ("save",),
    "other step": ("load",),
    **dict.fromkeys(OF_BYTES, ("verb",)),
    **dict.fromkeys(("resume", "kill store"), ("verb", "verb", "step", "settle")),
    **dict.fromkeys(LINKS, ("verb", "verb", "verb", *IN_TRAINING)),
}
_AT_LOCAL_POINTS = {
    OWNER: ("merge",),
    NEWCOMER: ("offer", "admission", "anchors", "message", "step"),
}
"""The points of kinds that cannot strike everywhere."""


class Accident(NamedTuple):
    """A fault, its victims, and where it strikes while a model trains in some ``way``.

    ``point`` is "verb" or a named point. At a verb the fault strikes ``when``
    ("before", "during" or "after" it) in ``step``; ``message``, ``verb`` and ``bit``
    are in [0, 1), and say which of all that there are. The model is attached with
    ``timeout_s`` and ``check_every``.
    """

    number: int
    way: str
    kind: str
    victims: tuple[int, ...]
    point: str
    when: str
    step: int
    message: float
    verb: float
    bit: float
    timeout_s: float
    check_every: int | None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return PARTITIONS.get(self.kind, 4)

    @property
    def processes(self) -> range:
        """The ranks, and the process that comes in, if one does."""
        return range(self.world + (self.kind in (REJOIN, NEWCOMER)))

    @property
    def heals_s(self) -> float:
        """The seconds after which links are whole again."""
        return 60.0**self.bit if self.kind == HEALED else FLAPS.get(self.kind, inf)

    @property
    def has_store(self) -> bool:
        """Whether a process beside the ranks holds the store."""
        return self.kind == "kill store" or self.way in (*SHRINKING, LOCAL)

    def __str__(self) -> str:
        who = " and ".join(map(str, self.victims))
        at = {
            "verb": f"{self.when} a verb of step {self.step}",
            "step": f"before step {self.step}",
            "message": f"{self.when} a message",
            "merge": f"{self.when} a merge",
        }
        where = at.get(self.point, f"at {self.point}")
        return f"trial {self.number}: {self.kind} of rank {who}, {where}, {self.way}"


def drawn(
    seed: int,
    number: int,
    kinds: Sequence[str],
    ways: Sequence[str],
    timeout_s: float,
    check_every: int | None,
) -> Accident:
    """The trial of a number: kinds take turns, and all else follows from the seed and
    the number.

    >>> print(drawn(1, 0, ["kill"], ["plain"], 5.0, 1))
    trial 0: kill of rank 0, during a verb of step 3, plain
    """
    draw = random.Random(f"{seed}/{number}")
    kind = kinds[number % len(kinds)]
    may = [way for way in ways if _suits(kind, way)]
    way = draw.choice(may or ["ring" if kind == FLIP_ON_THE_WAY else "plain"])
    points = _AT_POINTS.get(kind)
    if way in SHRINKING:
        points = ("verb", "verb", "step")
    if way == LOCAL:
        points = _AT_LOCAL_POINTS.get(kind, ("message", "message", "step"))
    if points is None:
        in_training = ("step",) if way == SERVER else IN_TRAINING
        named = [
            p for p in (*IN_ATTACH, *in_training) if p != "broadcast" or way != DDP
        ]
        points = [draw.choice(named), *["verb"] * 2]
    elif way == SERVER:
        points = ("verb",)
    world = PARTITIONS.get(kind, 4)
    among = [world] if kind == NEWCOMER else range(world)
    # DDP's second forward pass has a collective of its own, by its own group's
    # time-out.
    first = SAVE_AFTER + 1 if way == DDP or kind == "resume" else 1
    return Accident(
        number=number,
        way=way,
        kind=kind,
        victims=tuple(sorted(draw.sample(among, _NUM_VICTIMS.get(kind, 1)))),
        point=draw.choice(points),
        when=draw.choice(_WHENS),
        step=draw.randint(first, NUM_STEPS - 2),
        message=draw.random(),
        verb=draw.random(),
        bit=draw.random(),
        # a partition heals in time, or too late; a newcomer waits for the run to begin
        timeout_s=4 * timeout_s if kind in (HEALED, NEWCOMER) else timeout_s,
        check_every=check_every,
    )


def _suits(kind: str, way: str) -> bool:
    """Whether a kind can strike where a model is trained so."""
    if way in SHRINKING:
        return kind in SURVIVED and (way not in IN_PAIRS or kind != "kill two")
    if way == LOCAL:
        return kind in LOCAL_KINDS
    if way == FSDP:
        return kind not in _NOT_SHARDED
    if way == SERVER and kind in _NOT_SERVED:
        return False
    if kind == FLIP_ON_THE_WAY:
        return way in (HOSTS, *COLLECTIVES)  # others leave all to a library's sum
    return way != HOSTS or PARTITIONS.get(kind, 4) % 2 == 0
