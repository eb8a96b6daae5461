"""Network namespaces joined by a bridge, made without leaving a trace on the machine.

Bridge, links and hosts all live in namespaces held by one process (`_holder.py`), not
under names in ``/run/netns``. So two testbeds cannot collide, the machine's own
interfaces, routes and firewall are neither used nor touched, and a killed owner leaves
nothing behind. The same way works with and without root; without root the holder is
root inside a user namespace of its own.

    holder's namespace:  gwbridge = port0 port1 ...       port i  tbf: host i's downlink
    host i's namespace:  eth0, 10.77.0.(i+1), lo          eth0    tbf: host i's
    uplink

Far hosts have no bridge. Their eth0 are TAP devices, whose frames a forwarder keeps for
the delay; it also is host i's downlink.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gradwire.errors import InvalidSetting, invalid

from ..errors import TestbedUnavailable
from ._orphans import end_orphans, open_helper
from .forwarder import Forwarder, open_forwarder
from .wide_area import WideArea

# ---- The token bucket filter that slows a link down ----------------------------------
#
# Its figures and its command.
#
# Three figures decide whether a shaped link behaves like a real one:
#
# - **burst**: the bytes that a link saves up while idle and may then send at once. If
#   it is too small, every moment in which the machine's few cores keep a sender waiting
#   is lost for good. If it is too large, short messages after a pause travel for free.
#   40 MB float32 all-reduce by gloo on 4 hosts, as a ratio to 2 (3/4) bytes / rate
#   (1.046 is the floor: 1448 of 1514 bytes are payload), medians of 3 to 6 on two cores
#   that other programs used too, with a load average of 2 to 7:
#       200 Mbit: 0.7 and 1 ms 1.06 to 1.13, 2 ms 1.09, 2.5 ms 1.05 to 1.07, 4 ms 1.05
#       500 Mbit: 1 ms 1.05 to 1.10, 2 ms 1.06, 2.5 ms 1.05 to 1.12, 4 ms 1.04
#       1 Gbit: 1 ms 1.05 to 1.10, 2 ms 1.07, 2.5 ms 1.05
#   2.5 ms is a compromise: 4 ms would give a short exchange of 30 ms a seventh of its
#       time.
# - **limit**: the queue, which drops what does not fit. 20 ms carries a 3-to-1 incast
#   at 1.00 of the rate from 50 Mbit to 1 Gbit, for BBR and Reno alike; with a 5 ms
#   queue (and a 1 ms burst) the all-reduce took 1.37 of the ideal with Reno; 50 and 100
#   ms gained nothing.
# - **segment**: the largest piece the kernel hands over at once. A piece above the
#   burst is cut up by the filter, which costs processor time (all-reduce at 500 Mbit:
#   1.07, not 1.05), so pieces are kept to half of it.
#
# One stream alone got 0.97 to 1.00 of rate * 1448/1514 at 50, 200, 500 Mbit and 1 Gbit.

_MIN_BURST_BYTES = 32 * 1024
_MIN_LIMIT_BYTES = 256 * 1024
_LIMIT_S = 0.02
_MAX_SEGMENT_BYTES = 65_536  # what Linux hands to an interface at most in one piece


@dataclass(frozen=True, kw_only=True)
class Shaper:
    """Figures of one direction of a link, in bytes.

    ``segment_bytes`` is the largest piece TCP may hand over at once (GSO).
    """

    rate_bytes_per_s: float
    burst_bytes: int
    limit_bytes: int
    segment_bytes: int

    def line(self, device: str) -> str:
        """The ``tc -batch`` line that shapes what ``device`` sends, anew where it is
        shaped.
        """
        return (
            f"qdisc replace dev {device} root tbf rate "
            f"{round(self.rate_bytes_per_s * 8)}bit"
            f" burst {self.burst_bytes} limit {self.limit_bytes}"
        )


@dataclass(frozen=True, kw_only=True)
class LinkShapers:
    """Figures of both directions of a host's link."""

    up: Shaper
    down: Shaper


def choose_shaper(rate_bytes_per_s: float, mtu: int, burst_s: float) -> Shaper:
    """Burst, queue and segment size for a link."""
    burst_bytes = max(_MIN_BURST_BYTES, 4 * mtu, round(rate_bytes_per_s * burst_s))
    return Shaper(
        rate_bytes_per_s=rate_bytes_per_s,
        burst_bytes=burst_bytes,
        limit_bytes=max(
            _MIN_LIMIT_BYTES, 4 * burst_bytes, round(rate_bytes_per_s * _LIMIT_S)
        ),
        segment_bytes=min(_MAX_SEGMENT_BYTES, burst_bytes // 2),
    )


# ---- namespaces ----------------------------------------------------------------------


INTERFACE = "eth0"
MAX_HOSTS = 254
TCP_SETTINGS = Path("/proc/sys/net/ipv4")
"""TCP's settings, of the network namespace of the process that reads them."""
# often not in a user's PATH
_SYSTEM_FOLDERS = (
    "/usr/sbin",
    "/sbin",
    "/usr/bin",
    "/bin",
)
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2 (iproute-tc on some)",
    "nsenter": "util-linux",
}

# Pieces that wait until the forwarder has a core: at 42,000 a second, those of 0.2 s.
_TAP_QUEUE = 10_000

Privilege = Literal["root", "user namespace"]


@dataclass(frozen=True, kw_only=True)
class Namespaces:
    """Running namespaces: ``pids[i]`` is a process that sits in host i and does
    nothing.
    """

    holder_pid: int
    pids: tuple[int, ...]
    privilege: Privilege
    forwarder: Forwarder | None = None
    """In the bridge's place where hosts are far."""

    def enter(self, pid: int) -> list[str]:
        """Words to put before a command so that it runs in that process' network."""
        words = [find_tool("nsenter"), "--target", str(pid), "--net"]
        if self.privilege == "user namespace":
            words += ["--user", "--preserve-credentials"]
        return [*words, "--"]


def find_tool(name: str) -> str:
    """Path of a system program, looked for in the system folders too.

    Raises TestbedUnavailable when it is not installed.
    """
    path = os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM_FOLDERS))
    found = shutil.which(name, path=path)
    if found is None:
        raise TestbedUnavailable(
            f"{name!r} is not installed (package {_PACKAGES[name]})"
        )
    return found


def host_address(host: int) -> str:
    """IPv4 address of a host; only other hosts of the same testbed can see it."""
    return f"10.77.0.{host + 1}"


def has_own_network() -> bool:
    """Whether this process is a rank on a host whose network is not the machine's."""
    return os.environ.get("MASTER_ADDR") == host_address(0)


def set_own(name: str, value: str) -> None:
    """Writes a TCP setting of this host's own network namespace.

    Raises:
        InvalidSetting: This process is on no host of a testbed.
        OSError: The kernel does not take it.
    """
    if not has_own_network():
        raise InvalidSetting(
            "TCP's settings are changed on hosts of the testbed only, and this process "
            "has the machine's network; start it by gradwire testbed run, as root"
        )
    (TCP_SETTINGS / name).write_text(value, encoding="ascii")


def _hardware_address(host: int) -> str:
    return f"02:67:77:00:00:{host + 1:02x}"


def _bridge_lines(pids: Sequence[int], mtu: int) -> list[str]:
    # addrgenmode none: no IPv6 chatter, so that counters show the program's traffic
    #     only.
    quiet = "addrgenmode none"
    lines = [
        "link add gwbridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        f"link set gwbridge mtu {mtu} {quiet}",
        "link set gwbridge up",
    ]
    for host, pid in enumerate(pids):
        lines += [
            f"link add port{host} mtu {mtu} type veth peer name {INTERFACE} mtu {mtu} "
            f"address {_hardware_address(host)} netns {pid}",
            f"link set port{host} master gwbridge {quiet}",
            f"link set port{host} up",
        ]
    return lines


def _far_lines(pids: Sequence[int], mtu: int) -> list[str]:
    return [
        f"link set port{host} netns {pid} name {INTERFACE} mtu {mtu} "
        f"address {_hardware_address(host)} txqueuelen {_TAP_QUEUE}"
        for host, pid in enumerate(pids)
    ]


def _host_lines(host: int, num_hosts: int, segment_bytes: int) -> list[str]:
    # Permanent neighbours: no ARP, so a quiet network's counters stand still.
    others = [other for other in range(num_hosts) if other != host]
    return [
        "link set lo up",
        f"link set {INTERFACE} addrgenmode none gso_max_size {segment_bytes}",
        f"link set {INTERFACE} up",
        f"addr add {host_address(host)}/24 dev {INTERFACE}",
        *(
            f"neigh replace {host_address(other)} lladdr {_hardware_address(other)} "
            f"nud permanent dev {INTERFACE}"
            for other in others
        ),
    ]


def _batch(enter: Sequence[str], tool: str, lines: Sequence[str]) -> None:
    command = [*enter, find_tool(tool), "-batch", "-"]
    done = subprocess.run(
        command,
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    raise TestbedUnavailable(_explain_batch(tool, said))


def _explain_batch(tool: str, said: str) -> str:
    lowered = said.lower()
    if "unknown device type" in lowered or "not supported" in lowered:
        return f"the kernel lacks bridge or veth interfaces ({tool}: {said})"
    if tool == "tc" and ("qdisc" in lowered or "no such file" in lowered):
        return f"the kernel has no tbf shaper (tc: {said})"
    if "not permitted" in lowered:
        return f"no permission to configure a network of its own ({tool}: {said})"
    return f"{tool} failed: {said}"


def _wire_up(spaces: Namespaces, links: Sequence[LinkShapers], mtu: int) -> None:
    in_holder = spaces.enter(spaces.holder_pid)
    num_hosts = len(spaces.pids)
    lines = _bridge_lines if spaces.forwarder is None else _far_lines
    _batch(in_holder, "ip", lines(spaces.pids, mtu))
    # Any host may send to any other one: no piece is above the least burst.
    segment_bytes = min(
        min(link.up.segment_bytes, link.down.segment_bytes) for link in links
    )
    for host, pid in enumerate(spaces.pids):
        _batch(spaces.enter(pid), "ip", _host_lines(host, num_hosts, segment_bytes))
    shape(spaces, dict(enumerate(links)))


def shape(spaces: Namespaces, links: Mapping[int, LinkShapers]) -> None:
    """Gives these hosts' links other rates, also while bytes are on their way."""
    if spaces.forwarder is None:
        ports = [link.down.line(f"port{host}") for host, link in links.items()]
        _batch(spaces.enter(spaces.holder_pid), "tc", ports)
    else:
        for host, link in links.items():
            spaces.forwarder.shape(host, link.up, link.down)
    for host, link in links.items():
        _batch(spaces.enter(spaces.pids[host]), "tc", [link.up.line(INTERFACE)])


def set_link(spaces: Namespaces, host: int, *, up: bool) -> None:
    """Pulls the plug of a host's link, or puts it back."""
    if spaces.forwarder is not None:
        spaces.forwarder.set_link(host, up=up)
        return
    lines = [f"link set port{host} {'up' if up else 'down'}"]
    _batch(spaces.enter(spaces.holder_pid), "ip", lines)


def set_reach(spaces: Namespaces, host: int, others: Collection[int]) -> None:
    """Has what a host sends arrive at ``others`` only; it goes to an address that
    nobody has.
    """
    lines = []
    for other in range(len(spaces.pids)):
        address = _hardware_address(other if other in others else -1)
        if other != host:
            lines.append(
                f"neigh replace {host_address(other)} lladdr {address} nud permanent "
                f"dev {INTERFACE}"
            )
    _batch(spaces.enter(spaces.pids[host]), "ip", lines)


def join_network(spaces: Namespaces, host: int) -> None:
    """Moves this process, which must have one thread, into a host's network."""
    kinds = ("user", "net") if spaces.privilege == "user namespace" else ("net",)
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in kinds:
        with Path(f"/proc/{spaces.pids[host]}/ns/{kind}").open("rb") as space:
            if libc.setns(space.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"the {kind} namespace of a host")


def _congestion_controls() -> str:
    listing = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    if not listing.exists():
        return "see the kernel's own list"
    return listing.read_text(encoding="ascii").strip()


def _read_pids(
    holder: subprocess.Popen[str], congestion_control: str
) -> tuple[int, ...]:
    assert holder.stdout is not None
    word, _, rest = holder.stdout.readline().strip().partition(" ")
    if word == "ready":
        return tuple(int(pid) for pid in rest.split())
    if word == "congestion":
        raise invalid(
            "congestion_control",
            congestion_control,
            f"one that this kernel allows in namespaces ({_congestion_controls()})",
            "leave it empty to keep the machine's own",
        )
    raise TestbedUnavailable(
        "the kernel does not let this user make network namespaces "
        f"({rest or 'holder ended'})"
    )


@contextmanager
def open_namespaces(
    *,
    links: Sequence[LinkShapers],
    wide_area: WideArea,
    mtu: int,
    congestion_control: str,
    privilege: Privilege,
) -> Iterator[Namespaces]:
    """Makes the namespaces and shaped links, and takes them and all processes in them
    away.

    Raises TestbedUnavailable with one sentence naming the missing part.
    """
    if not sys.platform.startswith("linux"):
        raise TestbedUnavailable("network namespaces need Linux")
    for tool in _PACKAGES:
        find_tool(tool)
    end_orphans()
    with ExitStack() as stack:
        mode = "root" if privilege == "root" else "user"
        words = (mode, str(len(links)), congestion_control)
        holder = stack.enter_context(open_helper((), "_holder.py", *words))
        pids = _read_pids(holder, congestion_control)
        spaces = Namespaces(holder_pid=holder.pid, pids=pids, privilege=privilege)
        if wide_area.is_far:
            enter = spaces.enter(holder.pid)
            opened = open_forwarder(enter, len(links), wide_area)
            spaces = replace(spaces, forwarder=stack.enter_context(opened))
        _wire_up(spaces, links, mtu)
        yield spaces
