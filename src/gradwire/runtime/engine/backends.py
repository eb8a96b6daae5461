"""Backends: gloo carries payloads from host memory, NCCL from the device's.

Among the ranks of a host it is NCCL where each has a CUDA device of its own, and else
memory that the ranks share, if each can map that of the others (see `agree_to_lend`).
Between hosts ``gw.Options(backend=)`` says which: "gloo", "nccl", or "auto", which
measures both over the link and takes NCCL where gloo is what limits the rate. What lies
in host memory goes by gloo in any case.

NCCL's kernels of two groups that are launched in two orders may wait for each other for
ever. So where a device sends by itself, messages take one lane, one behind the other.
"""

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ...collective.steps.travel import bytes_sent
from ...contract.verbs import AllReduce, Among
from ...errors import invalid
from ..device.devices import HOST, kind_of
from ..transport.wire import RankGroup, carry_directly, carry_out, open_direct
from .engine import Engine

BACKENDS = ("auto", "gloo", "nccl")
FASTER = 1.5
"""The ratio of NCCL's rate to gloo's from which "auto" calls gloo the limit.

On a slow link both are as fast as that. Then gloo is better: it carries several
messages at once.
"""
AFTER_A_CHANGE = {
    "within_hosts": None,
    "between_hosts": "gloo",
    "why": "a rank was lost, or came in",
}
"""The back ends of a run whose ranks are others than it began with, for ``stats()``."""
_MEASURED_BYTES = 4 * 2**20
_NUM_TURNS = 4

OwnNetwork = Sequence[str]
"""A rank's device by a name no other has ("" where NCCL does not serve it), and why."""


def network_of(messages: Iterable[Any]) -> OwnNetwork:
    """The device on which messages are encoded, as all ranks have announced it."""
    first, *others = {one.device for one in messages if one.device != HOST} or [HOST]
    if (kind := kind_of(first)) is None or others:
        return (
            "",
            f"gradients are encoded on {'several devices' if others else 'the host'}",
        )
    name = kind.network_name(first)
    return name or "", "" if name else f"this torch has no NCCL for {first}"


def choose(
    backend: str, networks: Sequence[OwnNetwork], ranks_per_host: int
) -> tuple[bool, bool | None, str]:
    """Whether NCCL serves within hosts and between them, and why it cannot.

    Between hosts None lets the link decide.

    All ranks choose alike, as each has what all have announced of their devices. Raises
    ``InvalidSetting`` for a ``backend`` of "nccl" that a rank cannot use.

    >>> choose("auto", [("a", ""), ("b", "")], 1)
    (False, None, '')
    >>> choose("gloo", [("a", ""), ("b", "")], 2)
    (True, False, '')
    >>> choose("auto", [("a", ""), ("a", "")], 1)
    (False, False, 'ranks 0 and 1 share a device')
    """
    names = [name for name, _ in networks]
    why = [f"on rank {rank} {lack}" for rank, (_, lack) in enumerate(networks) if lack]
    firsts = enumerate(map(names.index, names))
    why += [
        f"ranks {first} and {rank} share a device"
        for rank, first in firsts
        if first < rank
    ]
    if why and backend == "nccl":
        raise invalid(
            "backend",
            backend,
            f"'auto' or 'gloo' where {why[0]}",
            "leave it out, or give each rank a CUDA device of its own and a torch "
            "with NCCL",
        )
    if why:
        return False, False, why[0]
    return ranks_per_host > 1, None if backend == "auto" else backend == "nccl", ""


def connect(
    engine: Engine,
    backend: str,
    networks: Sequence[OwnNetwork],
    messages: Iterable[Any],
) -> dict[str, Any]:
    """Opens groups of the device's own back end; returns what serves, for ``stats()``.

    That is None where a rank has nobody to reach, or DDP averages. ``link_bytes_per_s``
    has the rates of both where they were measured.
    """
    within, between, why = choose(backend, networks, engine.ranks_per_host)
    groups = engine.routes.groups
    found = dict[str, Any](why=why)
    device = next((one.device for one in messages if one.device != HOST), HOST)
    outer = groups.get(Among.HOSTS if engine.ranks_per_host > 1 else Among.RANKS)
    inner = "within_hosts", groups.get(Among.HOST), within
    for name, group, serves in (inner, ("between_hosts", outer, between)):
        if group is not None and serves is not False:
            engine.meanwhile(
                "connect", partial(open_direct, group, device, engine.timeout)
            )
            if serves is None:
                measure = partial(_rates, group, groups[Among.RANKS], device)
                rates = found["link_bytes_per_s"] = engine.meanwhile(
                    "measure the link", measure
                )
                if rates["nccl"] < FASTER * rates["gloo"]:
                    group.close_direct()
        found[name] = None if group is None else "nccl" if group.direct else "gloo"
        if group is not None and group.lends:
            group.lends = group.direct is None
            found[name] = "memory" if group.lends else "nccl"
    return found


def _rates(
    group: RankGroup, ranks: RankGroup, device: torch.device
) -> dict[str, float]:
    """The bytes a second that a rank sends by either back end.

    All ``ranks`` get the same figures.

    They are by the fastest of a few all-reduces of 4 MiB, on average over ranks.
    """
    sums_s = torch.full((2,), math.inf, dtype=torch.float64)
    kind = kind_of(device)
    assert kind is not None, "the host has one back end"
    for place, where in enumerate((HOST, device)):
        verb = AllReduce(torch.zeros(_MEASURED_BYTES // 4, device=where))
        for _ in range(_NUM_TURNS):
            start_s = time.perf_counter()
            if where == HOST:
                carry_out([verb], group.channels[:1])
            else:
                carry_directly([verb], [group.direct], device)
                kind.record(kind.current_stream(device)).synchronize()
            sums_s[place] = min(float(sums_s[place]), time.perf_counter() - start_s)
    carry_out([AllReduce(sums_s)], ranks.channels[:1])
    sent_bytes = ranks.world * bytes_sent("all_reduce", _MEASURED_BYTES, group.world)
    return dict(zip(("gloo", "nccl"), (sent_bytes / sums_s).tolist(), strict=True))
