"""Backends: what carries payloads between ranks, gloo from host memory or NCCL from the device's.

Among the ranks of a host it is NCCL where each has a CUDA device of its own. Between hosts
``attach(backend=)`` says which: "gloo", "nccl", or "auto", which takes NCCL where gloo is what
limits the rate and not the link. What lies in host memory goes by gloo in any case.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from ..errors import invalid
from ..travel import bytes_sent
from ..verbs import AllReduce, Among
from .devices import HOST, kind_of
from .engine import Engine
from .wire import Circle, carry_out, open_direct

BACKENDS = ("auto", "gloo", "nccl")
GLOO_LIMIT_BYTES_PER_S = 5e8
"""The rate of a measured link, in bytes a second, from which gloo and not the link is the limit.

It is 4 Gbit/s: about half of what gloo's own sockets reach without a link, by ``gradwire doctor``
on the loopback of a machine of two cores (7 to 9 Gbit/s where it is quiet).
"""
_MEASURED_BYTES = 4 * 2**20
_NUM_TURNS = 3


class Network(TypedDict):
    """What a rank tells the others of the device that its gradients are encoded on."""

    device: str | None
    """A name that no other device has; None where NCCL does not serve it."""
    lack: str
    """Why it does not, in words."""


class Backend(NamedTuple):
    """What was chosen: whether NCCL serves ``within`` hosts, and ``between`` them.

    None stands for what the measured link decides. ``why`` says why not, in words.
    """

    within: bool
    between: bool | None
    why: str = ""


def network_of(messages: Iterable[Any]) -> Network:
    """The device on which messages are encoded, as all ranks are told of it."""
    first, *others = {one.device for one in messages if one.device != HOST} or [HOST]
    kind = kind_of(first)
    if kind is None:
        return Network(device=None, lack="gradients are encoded on the host")
    if others:
        return Network(device=None, lack="gradients lie on several devices")
    name = kind.network_name(first)
    return Network(device=name, lack="" if name else f"this torch has no NCCL for {first}")


def choose(backend: str, networks: Sequence[Network], ranks_per_host: int) -> Backend:
    """The back ends that all ranks choose alike, as all have what each has told of its device.

    Raises ``InvalidSetting`` for a ``backend`` of "nccl" that a rank cannot use.

    >>> a, b = Network(device="a", lack=""), Network(device="b", lack="")
    >>> choose("auto", [a, b], 1), choose("gloo", [a, b], 2)
    (Backend(within=False, between=None, why=''), Backend(within=True, between=False, why=''))
    >>> choose("auto", [a, a], 1).why
    'ranks 0 and 1 share a device'
    """
    why = _lack(networks)
    if not why:
        return Backend(ranks_per_host > 1, None if backend == "auto" else backend == "nccl")
    if backend == "nccl":
        remedy = "leave it out, or give each rank a CUDA device of its own and a torch with NCCL"
        raise invalid("backend", backend, f"'auto' or 'gloo' where {why}", remedy)
    return Backend(False, False, why)


def _lack(networks: Sequence[Network]) -> str:
    for rank, one in enumerate(networks):
        if one["device"] is None:
            return f"on rank {rank} {one['lack']}"
    names = [one["device"] for one in networks]
    for rank, name in enumerate(names):
        if (first := names.index(name)) < rank:
            return f"ranks {first} and {rank} share a device"
    return ""


def connect(engine: Engine, chosen: Backend, messages: Iterable[Any]) -> dict[str, Any]:
    """Opens the groups of the device's own back end; returns what serves, for ``stats()``.

    ``link_bytes_per_s`` is there where the link was measured. Where a rank reaches nobody, or DDP
    averages, nothing serves.
    """
    circles, rate, between = engine.routes.circles, None, chosen.between
    if Among.RANKS not in circles:
        return {"within_hosts": None, "between_hosts": None, "why": chosen.why}
    if between is None:
        own = circles[Among.RANKS]
        rate = engine.meanwhile("measure the link", lambda: gloo_bytes_per_s(own))
        between = rate >= GLOO_LIMIT_BYTES_PER_S
    device = next((one.device for one in messages if one.device != HOST), HOST)
    outer = Among.HOSTS if engine.ranks_per_host > 1 else Among.RANKS
    serves = {
        "within_hosts": _serve(engine, Among.HOST, device, is_direct=chosen.within),
        "between_hosts": _serve(engine, outer, device, is_direct=between),
    }
    measured = {} if rate is None else {"link_bytes_per_s": rate}
    return {**serves, "why": chosen.why, **measured}


def _serve(engine: Engine, among: Among, device: torch.device, *, is_direct: bool) -> str | None:
    """The back end that serves these ranks, whose group is opened; None where there are none."""
    circle = engine.routes.circles.get(among)
    if circle is None or not is_direct:
        return None if circle is None else "gloo"
    who = engine.who.among(among, engine.ranks_per_host)
    circle.direct = engine.meanwhile(
        "connect devices", lambda: open_direct(who, device, engine.timeout)
    )
    return "nccl"


def gloo_bytes_per_s(circle: Circle) -> float:
    """The bytes a second that gloo sends over the link of a rank; all ranks get the same figure.

    It is by the fastest of a few all-reduces of 4 MiB, on average over ranks.
    """
    buffer_N, channel = torch.zeros(_MEASURED_BYTES // 4), [circle.channels[0]]
    taken_s = []
    for _ in range(1 + _NUM_TURNS):  # the first one opens connections
        start_s = time.perf_counter()
        carry_out([AllReduce(buffer_N)], channel)
        taken_s.append(time.perf_counter() - start_s)
    sum_s = torch.tensor([min(taken_s[1:])], dtype=torch.float64)
    carry_out([AllReduce(sum_s)], channel)
    sent = bytes_sent("all_reduce", _MEASURED_BYTES, circle.world)
    return sent * circle.world / float(sum_s)
