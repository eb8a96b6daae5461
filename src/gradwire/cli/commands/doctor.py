"""Look at this machine, measure its link under torchrun, and print Markdown."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...contract.bounds import check_number
from ...contract.units import format_bytes, parse_rate
from ...errors import GradwireError, invalid
from ...measure.far_link import FarLink, tcp_problems, tcp_settings
from ..report.links import line_row
from ..report.output import emit, installed_version, machine, progress
from ..report.table import Row, cell, heading, in_sections, markdown

if TYPE_CHECKING:
    from ...measure.links import LinkReport


# ---- The facts behind ``gradwire doctor`` --------------------------------------------
#
# Each function looks at one thing and returns rows.

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "CXX",
    "XDG_CACHE_HOME",
)
SLOW_NAME_S = 1.0
"""The seconds for a name above which a rank's start is slow.

Servers that answer take a hundredth.
"""
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")

_SIOCGIFADDR = 0x8915  # linux/sockios.h: get an interface's IPv4 address


def versions() -> list[Row]:
    """This machine, and the versions of what gradwire stands on."""
    rows: list[Row] = [
        {"name": heading(key), "value": cell(key, value)}
        for key, value in machine().items()
    ]
    rows += [
        {"name": name, "value": installed_version(name) or "not installed"}
        for name in ("numpy", "triton")
    ]
    return rows


def backends() -> list[Row]:
    """Back ends of torch.distributed here, and memory that ranks can share."""
    import torch
    import torch.distributed as dist

    from ...exchange.mapped_room import MappedRoom

    if not dist.is_available():
        return [{"name": "torch.distributed", "available": False}]
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    room = MappedRoom(1, torch.empty(1), torch.uint8)
    shared: Row = {
        "name": "shared memory",
        "available": room.is_open,
        "reason": room.why or None,
    }
    return [
        *({"name": name, "available": there} for name, there in found.items()),
        shared,
    ]


def interfaces(
    names: Sequence[str] | None = None, folder: Path = Path("/sys/class/net")
) -> list[Row]:
    """Network interfaces that are up or have an address; all that there are, or these.

    What is said of them beside addresses stands in ``folder``, which a container may
    lack.
    """
    rows: list[Row] = []
    for name in names or sorted(name for _, name in socket.if_nameindex()):
        path = folder / name
        addresses = [*_ipv4(name), *_ipv6(name)]
        if not addresses and _read(path / "operstate") != "up":
            continue
        mtu = _read(path / "mtu")
        speed_mbit = int(_read(path / "speed") or -1)
        rows.append(
            {
                "name": name,
                "mtu": int(mtu) if mtu else None,
                "speed_bytes_per_s": speed_mbit * 125_000.0 if speed_mbit > 0 else None,
                "addresses": addresses,
            }
        )
    return rows


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # many drivers answer "invalid argument" where they know no speed
        return ""


def _ipv4(name: str) -> list[str]:
    request = struct.pack("256s", name[:15].encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            answer = fcntl.ioctl(control.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6(name: str) -> list[str]:
    lines = (line.split() for line in _read(Path("/proc/net/if_inet6")).splitlines())
    return [
        str(ipaddress.IPv6Address(bytes.fromhex(line[0])))
        for line in lines
        if line[5] == name
    ]


def kernels() -> list[Row]:
    """Rows of kernels that serve on the CPU, built if need be, and on a GPU."""
    from ...contract.registry import load, names
    from ...kernels.compiler import find_compiler, origins
    from ...kernels.libraries import backend

    every = [(name, load("compress", name)) for name in names("compress")]
    on_host = [name for name, kind in every if getattr(kind.traits, "host_only", False)]
    on_gpu = "Triton" if find_spec("triton") else "torch operations"
    own = {"backend": backend(), "served by": ", ".join(origins())}
    return [
        {"name": "CPU kernels", **own, "compiler": find_compiler() or "none found"},
        {
            "name": "GPU kernels",
            "backend": on_gpu,
            "encoded on the host": ", ".join(on_host),
        },
    ]


def gpus() -> list[Row]:
    """GPUs that torch sees."""
    import torch

    rows = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        rows.append(
            {
                "name": f"cuda:{index}",
                "model": found.name,
                "memory_bytes": found.total_memory,
                "capability": f"{found.major}.{found.minor}",
            }
        )
    return rows


def environment() -> list[Row]:
    """Variables that decide how ranks find each other and how many threads they use."""
    return [
        {"name": name, "value": value}
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or name.startswith(PREFIXES)
    ]


def host_address() -> str | None:
    """The address that this host's name resolves to.

    Gloo listens there unless told otherwise.
    """
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def network_warnings(
    found: Sequence[Mapping[str, object]],
    variables: Mapping[str, str],
    address: str | None,
) -> list[Row]:
    """Warnings of obstacles to meeting: interfaces, variables, the host's address."""
    names = [str(row["name"]) for row in found]
    outer = [name for name in names if name != "lo"]
    rows = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = variables.get(variable, "")
        if (
            wanted
            and not wanted.startswith("^")
            and not _names_one(wanted, names, variable)
        ):
            rows.append(
                _warning(
                    variable,
                    f"{wanted!r} is no interface of this host",
                    f"set it to one of {', '.join(names)}",
                )
            )
    loopback = address is None or address.startswith("127.")
    if loopback and outer and "GLOO_SOCKET_IFNAME" not in variables:
        where = f"resolves to {address}" if address else "does not resolve"
        rows.append(
            _warning(
                "host name",
                f"the host's name {where}, so gloo ranks on other hosts cannot "
                "reach it",
                f"for more than one host set GLOO_SOCKET_IFNAME={outer[0]}",
            )
        )
    world = variables.get("WORLD_SIZE")
    local = variables.get("LOCAL_WORLD_SIZE")
    master = variables.get("MASTER_ADDR", "")
    if world != local and (master == "localhost" or master.startswith("127.")):
        rows.append(
            _warning(
                "MASTER_ADDR",
                f"{master} means another machine on every host, and ranks run on "
                "several",
                "set it to the first host's own address",
            )
        )
    return rows


def _names_one(wanted: str, names: Sequence[str], variable: str) -> bool:
    if variable == "GLOO_SOCKET_IFNAME":
        return all(name in names for name in wanted.split(","))
    if wanted.startswith("="):
        return any(name in names for name in wanted[1:].split(","))
    return any(name.startswith(start) for start in wanted.split(",") for name in names)


def outer_addresses(found: Sequence[Mapping[str, object]]) -> list[str]:
    """The first address of each interface but the loopback, to connect from.

    ``found`` are rows of ``interfaces``.
    """
    rows = [row["addresses"] for row in found if row["name"] != "lo"]
    return [
        str(addresses[0])
        for addresses in rows
        if isinstance(addresses, list) and addresses
    ]


def naming_s(address: str) -> float:
    """The seconds until a name for an address is found, or is known not to be."""
    start_s = time.perf_counter()
    with suppress(OSError):
        socket.getnameinfo((address, 0), 0)
    return time.perf_counter() - start_s


def naming_warnings(seconds: Mapping[str, float]) -> list[Row]:
    """Addresses whose names torch's store learns so slowly that ranks wait.

    It asks for the name of every address that connects (pytorch#159007). Where no
    server answers, each connection holds all ranks up.
    """
    remedy = (
        "name the hosts in /etc/hosts, or set RES_OPTIONS=attempts:0 for every rank, "
        "so that no server is asked"
    )
    slow = {
        address: taken_s
        for address, taken_s in seconds.items()
        if taken_s > SLOW_NAME_S
    }
    return [
        _warning("name server", f"no name for {address} within {taken_s:.1f} s", remedy)
        for address, taken_s in slow.items()
    ]


def thread_warnings(variables: Mapping[str, str], num_cores: int) -> list[Row]:
    """Ranks of this host that want more cores than it has."""
    num_ranks = int(variables.get("LOCAL_WORLD_SIZE", "1"))
    threads = variables.get("OMP_NUM_THREADS", "")
    num_threads = int(threads) if threads.isdecimal() else num_cores
    if num_ranks == 1 or num_ranks * num_threads <= num_cores:
        return []
    return [
        _warning(
            "threads",
            f"{num_ranks} ranks of {num_threads} threads share {num_cores} cores",
            f"set OMP_NUM_THREADS={max(1, num_cores // num_ranks)} for every rank",
        )
    ]


def part_warnings(built: list[Row], seen: list[Row], found: list[Row]) -> list[Row]:
    """Parts that are missing here: rows of kernels, gpus and backends say so."""
    rows = []
    if built[0]["backend"] != "cpp":
        rows.append(
            _warning(
                "CPU kernels",
                "kernels run as torch code, some of it a hundred times slower",
                "install a C++ compiler (apt install g++), or the wheel of this "
                "platform",
            )
        )
    if seen and not any(row["name"] == "nccl" and row["available"] for row in found):
        rows.append(
            _warning(
                "nccl",
                "there is a GPU, and this build of torch has no NCCL",
                "install a torch build for CUDA",
            )
        )
    return rows


def _warning(name: str, problem: str, remedy: str) -> dict[str, object]:
    return {"name": name, "problem": problem, "remedy": remedy}


def far_link(
    rate: str | None, rtt_ms: float | None, report: LinkReport | None
) -> FarLink | None:
    """The link as given, else as measured; None where it is neither.

    Raises ``InvalidSetting`` where only one of both figures is given.
    """
    if rate is not None and rtt_ms is not None:
        check_number("rtt", rtt_ms, "0 to 10000 milliseconds", "ping tells it", 0, 1e4)
        return FarLink(rate_bytes_per_s=parse_rate(rate), round_trip_s=rtt_ms / 1e3)
    if rate is not None or rtt_ms is not None:
        raise invalid(
            "a link",
            rate or rtt_ms,
            "--rate and --rtt together",
            "ping tells the second",
        )
    if report is None or report.round_trip_s is None:
        return None
    measured = report.rate_bytes_per_s
    if not isfinite(measured):
        return None
    return FarLink(rate_bytes_per_s=measured, round_trip_s=report.round_trip_s)


def tcp_rows(found: Mapping[str, str | OSError]) -> list[Row]:
    """TCP's settings that a far link depends on, or why they cannot be read."""
    return [
        {"name": name, "value": None, "reason": f"cannot be read: {setting.strerror}"}
        if isinstance(setting, OSError)
        else {"name": name, "value": setting}
        for name, setting in found.items()
    ]


def far_rows(link: FarLink) -> list[Row]:
    """A link's bandwidth-delay product, and the seconds that a pause may cost."""
    return [
        {
            "name": "one connection",
            "rate_bytes_per_s": link.rate_bytes_per_s,
            "round_trip_s": link.round_trip_s,
            "bandwidth_delay_bytes": link.bandwidth_delay_bytes,
            "idle_loss_s": link.idle_loss_s,
        }
    ]


# ---- the command ---------------------------------------------------------------------


app = typer.Typer(help=__doc__)

NOISY = 0.25
"""Relative error of the fit above which alpha and beta should not be relied on."""


@app.command()
def doctor(
    rate: Annotated[
        str | None, typer.Option(help="Rate of a far link [default: as measured].")
    ] = None,
    rtt: Annotated[
        float | None,
        typer.Option(help="Milliseconds of its round trip [default: as measured]."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.")
    ] = False,
) -> None:
    """Look at this machine; prints Markdown to paste into an issue.

    Started by torchrun, it also measures the link between its ranks, and rank 0 prints.
    With a rate and a round trip it says what TCP's settings of this host cost there.
    """
    report = _measured() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    if int(os.environ.get("RANK", "0")) != 0:
        return
    link = far_link(rate, rtt, report)
    sections = _sections(report, link)
    if json:
        emit("doctor", in_sections(sections), as_json=True, title="")
        return
    print("# gradwire doctor")
    for title, rows in sections.items():
        known = [
            {key: value for key, value in row.items() if value is not None}
            for row in rows
        ]
        print(f"\n## {title}\n\n{markdown(known) if known else 'none'}")


def _sections(report: LinkReport | None, link: FarLink | None) -> dict[str, list[Row]]:
    joined = interfaces()
    links = backends()
    compiled = kernels()
    cards = gpus()
    named = {one: naming_s(one) for one in outer_addresses(joined)}
    tcp = tcp_settings()
    sections = {
        "Machine": versions(),
        "Back ends": links,
        "Interfaces": joined,
        "Kernels": compiled,
        "GPU": cards,
        "Environment": environment(),
        "TCP": tcp_rows(tcp),
    }
    warnings = [
        *network_warnings(joined, os.environ, host_address()),
        *naming_warnings(named),
        *thread_warnings(os.environ, len(os.sched_getaffinity(0))),
        *part_warnings(compiled, cards, links),
    ]
    if report is not None:
        sections["Link"] = fit_rows(report)
        sections["All-reduces"] = [
            {"name": format_bytes(size_bytes), "median_s": seconds}
            for size_bytes, seconds in report.fit.samples
        ]
        warnings += link_warnings(report)
    if link is not None:
        sections["Far link"] = far_rows(link)
        warnings += [one._asdict() for one in tcp_problems(link, tcp)]
    return sections | {"Warnings": warnings}


def fit_rows(report: LinkReport) -> list[Row]:
    """The measured link as a row: seconds = alpha + beta * bytes of an all-reduce."""
    line = line_row(f"{report.world} ranks, {report.backend}", report.fit)
    return [{**line, "rate_bytes_per_s": report.rate_bytes_per_s}]


def link_warnings(report: LinkReport) -> list[Row]:
    """Whether the fit can be relied on."""
    found = report.fit
    if found.residual <= NOISY and found.alpha_s > 0 and found.per_unit_s > 0:
        return []
    return [
        _warning(
            "link",
            f"the fit misses the times by {100 * found.residual:.0f} % or lacks a term",
            "something else uses the machine or the link: repeat when it is quiet",
        )
    ]


def _measured() -> LinkReport:
    from ...measure import links

    with progress("measuring the link", len(links.TORCH_SIZES_BYTES)) as advance:
        try:
            return links.launched_link(advance)
        except RuntimeError as error:
            raise GradwireError(
                f"the link could not be measured: {error}; check that MASTER_ADDR and "
                "the interface in GLOO_SOCKET_IFNAME can be reached from every host"
            ) from error
