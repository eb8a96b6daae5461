"""Hosts to run ranks on: shaped ones where the machine allows it, else plain
loopback.
"""

import functools
import logging
import os
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from gradwire.contract.bounds import check_number, check_whole
from gradwire.errors import invalid

from ..errors import TestbedUnavailable
from ._orphans import end_orphans
from .counters import LOOPBACK, InterfaceCounters, read_counters
from .netns import (
    INTERFACE,
    MAX_HOSTS,
    LinkShapers,
    Namespaces,
    Privilege,
    choose_shaper,
    host_address,
    open_namespaces,
    set_link,
    set_reach,
    shape,
)
from .relay import open_relay
from .wide_area import NEAR, WideArea, check_rate

_logger = logging.getLogger("gradwire")


MAX_RANKS_PER_HOST = 64


@dataclass(frozen=True, kw_only=True)
class Testbed:
    """The settings of a testbed: hosts on one switch, with full duplex links of equal
    rate, or what ``wide_area`` makes of these.

    ``ranks_per_host`` ranks share a host's link. What they send each other does not
    cross it.

    ``rate_bytes_per_s`` is the rate of Ethernet frames in each direction of each host's
    link (use `units.parse_rate`); a TCP stream gets (mtu - 52) / (mtu + 14) of it.
    ``burst_s`` is how much unused time a link saves up: after a pause the bytes of so
    many seconds pass at once (see `tc` for why it is not zero). ``congestion_control``
    is set inside the hosts only; "" keeps the machine's own.
    """

    __test__: ClassVar[bool] = False  # pytest must not collect it

    hosts: int = 4
    ranks_per_host: int = 1
    rate_bytes_per_s: float = 62_500_000.0
    mtu: int = 1500
    burst_s: float = 0.0025
    congestion_control: str = ""
    wide_area: WideArea = NEAR

    def __post_init__(self) -> None:
        check_whole("hosts", self.hosts, "4 is a good number", most=MAX_HOSTS)
        ranks_per_host = self.ranks_per_host
        remedy = "leave it out for 1"
        check_whole("ranks_per_host", ranks_per_host, remedy, most=MAX_RANKS_PER_HOST)
        check_rate("rate_bytes_per_s", self.rate_bytes_per_s)
        for host, _ in self.wide_area.slow:
            if host >= self.hosts:
                accepted = f"one of the {self.hosts} hosts, 0 to {self.hosts - 1}"
                raise invalid("slow host", host, accepted, "or add hosts")
        check_whole("mtu", self.mtu, "Ethernet has 1500", least=576, most=65_000)
        accepted = "between 0 and 1 second"
        check_number("burst_s", self.burst_s, accepted, "leave it out", 0, 1)

    def link_shapers(self, host: int) -> LinkShapers:
        """Figures of both directions of a host's link."""
        rate = self.rate_bytes_per_s
        up = self.wide_area.up(host, rate)
        down = self.wide_area.down(host, rate)
        return LinkShapers(
            up=choose_shaper(up, self.mtu, self.burst_s),
            down=choose_shaper(down, self.mtu, self.burst_s),
        )


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts that exist now; entry i of every tuple belongs to host i.

    Rank r runs on host r // ``ranks_per_host``. ``shaped`` tells whether
    ``rate_bytes_per_s`` is enforced; on plain loopback it is not, and all hosts share
    one address and one interface. ``master_port`` is free on host 0. Behind a relay it
    is enforced for programs of `run_ranks`.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    interface: str
    rate_bytes_per_s: float
    shaped: bool
    master_port: int
    ranks_per_host: int = 1
    namespaces: Namespaces | None = None
    relay_port: int | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_ranks(self) -> int:
        """The ranks of all hosts."""
        return len(self) * self.ranks_per_host

    def command_on(self, host: int, command: list[str]) -> list[str]:
        """The command that runs ``command`` on a host."""
        if self.namespaces is None:
            return command
        return [*self.namespaces.enter(self.namespaces.pids[host]), *command]

    def read_counters(self) -> tuple[InterfaceCounters, ...]:
        """Counters of every host's interface, read inside the host."""
        if self.namespaces is None:
            return (read_counters(Path("/proc/net/dev"), self.interface),) * len(self)
        return tuple(
            read_counters(Path(f"/proc/{pid}/net/dev"), self.interface)
            for pid in self.namespaces.pids
        )


@dataclass(frozen=True, kw_only=True)
class Availability:
    """The kind of shaped hosts that this machine can make, and one sentence on why
    (not).
    """

    kind: Literal["root", "user namespace", "none"]
    reason: str

    def __bool__(self) -> bool:
        return self.kind != "none"


def _links(settings: Testbed) -> dict[int, LinkShapers]:
    return {host: settings.link_shapers(host) for host in range(settings.hosts)}


def _privileges() -> tuple[Privilege, ...]:
    # A container's root may lack the right to make namespaces and still have user
    # namespaces.
    if os.geteuid() == 0:
        return ("root", "user namespace")
    return ("user namespace",)


def _open_first(stack: ExitStack, settings: Testbed) -> Namespaces:
    reason = TestbedUnavailable("no way tried")
    for privilege in _privileges():
        try:
            return stack.enter_context(
                open_namespaces(
                    links=list(_links(settings).values()),
                    wide_area=settings.wide_area,
                    mtu=settings.mtu,
                    congestion_control=settings.congestion_control,
                    privilege=privilege,
                )
            )
        except TestbedUnavailable as problem:
            reason = problem
    raise reason


@contextmanager
def shaped_hosts(settings: Testbed) -> Iterator[Hosts]:
    """Hosts with shaped links for the length of a ``with`` block.

    Leaving the block ends whatever still runs on them. Raises TestbedUnavailable where
    the machine cannot do it; see `available` and `open_hosts`.
    """
    with ExitStack() as stack:
        spaces = _open_first(stack, settings)
        yield Hosts(
            names=tuple(f"host{host}" for host in range(settings.hosts)),
            addresses=tuple(host_address(host) for host in range(settings.hosts)),
            interface=INTERFACE,
            rate_bytes_per_s=settings.rate_bytes_per_s,
            shaped=True,
            ranks_per_host=settings.ranks_per_host,
            master_port=29500,  # every host has all ports to itself
            namespaces=spaces,
        )
        if spaces.forwarder is not None:
            # stdout is a verb's own, of which it may make one JSON object
            print(spaces.forwarder.counters(), file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


@contextmanager
def loopback_hosts(settings: Testbed) -> Iterator[Hosts]:
    """Hosts without namespaces or limits for a ``with`` block: every host is this
    machine.
    """
    end_orphans()
    yield Hosts(
        names=tuple(f"host{host}" for host in range(settings.hosts)),
        addresses=("127.0.0.1",) * settings.hosts,
        interface=LOOPBACK,
        rate_bytes_per_s=settings.rate_bytes_per_s,
        shaped=False,
        ranks_per_host=settings.ranks_per_host,
        master_port=_free_port(),
    )


@contextmanager
def relayed_hosts(settings: Testbed) -> Iterator[Hosts]:
    """Hosts of one rank each whose rates a relay limits in user space, for a ``with``
    block.
    """
    given = settings.rate_bytes_per_s, settings.burst_s, settings.wide_area
    with loopback_hosts(settings) as hosts, open_relay(*given) as relay_port:
        yield replace(hosts, shaped=True, relay_port=relay_port)


@functools.cache
def _say_once(sentence: str) -> None:
    _logger.warning(sentence)


@contextmanager
def open_hosts(settings: Testbed) -> Iterator[Hosts]:
    """Shaped hosts where the machine allows it, else loopback and one logged
    sentence.
    """
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(shaped_hosts(settings))
        except TestbedUnavailable as problem:
            near = " and without delay" * settings.wide_area.is_far
            _say_once(
                f"no shaped links, running on plain loopback at full speed{near}: "
                f"{problem}"
            )
            hosts = stack.enter_context(loopback_hosts(settings))
        yield hosts


def available(settings: Testbed | None = None) -> Availability:
    """Whether shaped hosts can be made: it really makes and removes some.

    Args:
        settings: The hosts to make. Default: one that is near, which takes about 50 ms.
    """
    wanted = settings or Testbed(hosts=1)
    try:
        with ExitStack() as stack:
            kind = _open_first(stack, wanted).privilege
    except TestbedUnavailable as problem:
        return Availability(kind="none", reason=str(problem))
    how = "as root" if kind == "root" else "in a user namespace, without root"
    return Availability(kind=kind, reason=f"shaped hosts can be made {how}")


# ---- HostLinks that fail -------------------------------------------------------------
#
# What may happen to the links of shaped hosts while ranks run on them.


class HostLinks:
    """The links of shaped hosts that were made with these settings."""

    def __init__(self, hosts: Hosts, settings: Testbed) -> None:
        if hosts.namespaces is None:
            raise TestbedUnavailable("plain loopback has no links that could fail")
        self._spaces = hosts.namespaces
        self._settings = settings
        self._all = range(len(hosts))

    def cut(self, host: int) -> None:
        """Takes a host's link down: nothing passes either way."""
        set_link(self._spaces, host, up=False)

    def mute(self, host: int) -> None:
        """Loses all that a host sends; what others send still arrives."""
        set_reach(self._spaces, host, ())

    def part(self, side: Collection[int]) -> None:
        """Parts the network: the hosts of a side reach each other, and so do the
        rest.
        """
        for host in self._all:
            set_reach(
                self._spaces,
                host,
                [o for o in self._all if (o in side) == (host in side)],
            )

    def slow(self, host: int, rate_bytes_per_s: float) -> None:
        """Gives a host's link another rate, in both directions."""
        slowed = WideArea(slow=((host, rate_bytes_per_s),))
        given = replace(self._settings, wide_area=slowed)
        shape(self._spaces, {host: given.link_shapers(host)})

    def mend(self) -> None:
        """Makes all links as they were."""
        for host in self._all:
            set_link(self._spaces, host, up=True)
            set_reach(self._spaces, host, self._all)
        shape(self._spaces, _links(self._settings))
