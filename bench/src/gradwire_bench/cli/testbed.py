"""Run a command on several hosts with slow links, all on this machine."""

import sys
import time
from typing import Annotated

import typer

from gradwire.cli.report.output import emit
from gradwire.contract.units import parse_rate

from ..testbed.checked import check_links
from ..testbed.counters import InterfaceCounters
from ..testbed.hosts import Hosts, Testbed, available, open_hosts
from ..testbed.launch import exit_code, failure_text, launch
from ..testbed.wide_area import NEAR, WideArea, read_wide_area
from ._options import Delay, Down, Jitter, RanksPerHost, Up, option, with_links

app = typer.Typer(no_args_is_help=True, help=__doc__)

_JSON = option("Print one JSON object.", "--json")


# Options end at the first word of the command, so that "--" is not needed before it.
@app.command(context_settings={"allow_interspersed_args": False})
@with_links
def run(
    wide_area: WideArea,
    command: Annotated[list[str], typer.Argument(help="What every rank runs.")],
    hosts: Annotated[int, option("Number of hosts.")] = 4,
    ranks_per_host: RanksPerHost = 1,
    rate: Annotated[str, option("Link rate in each direction.")] = "500mbit",
    mtu: Annotated[int, option("Largest packet in bytes.")] = 1500,
    timeout: Annotated[float | None, option("Seconds until all are ended.")] = None,
    grace: Annotated[
        float, option("Seconds left to the others after a failure.")
    ] = 5.0,
    all_output: Annotated[bool, option("Show every rank's lines.")] = False,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Run a command once per rank, with torchrun's variables, and count what crosses
    the links.

    Rank 0's output is shown, the others' when they fail. The exit code is that of the
    rank that failed first, 124 after a timeout. With --json rank 0's stdout goes to
    stderr.
    """
    settings = Testbed(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        rate_bytes_per_s=parse_rate(rate),
        mtu=mtu,
        wide_area=wide_area,
    )
    with open_hosts(settings) as opened:
        before = opened.read_counters()
        started_s = time.monotonic()
        exits = launch(
            opened,
            command,
            timeout_s=timeout,
            grace_s=grace,
            output="all" if all_output else "first",
            stdout=sys.stderr if json else None,
        )
        seconds = time.monotonic() - started_s
        rows = _rows(opened, before, opened.read_counters(), seconds)
    links = f"{rate} links{settings.wide_area}" if opened.shaped else "plain loopback"
    ranks = f" of {ranks_per_host} ranks" if ranks_per_host > 1 else ""
    emit("testbed run", rows, as_json=json, title=f"{hosts} hosts{ranks}, {links}")
    code = exit_code(exits)
    if code:
        typer.echo(f"gradwire: {failure_text(exits)}", err=True)
    raise typer.Exit(code)


def _rows(
    hosts: Hosts,
    before: tuple[InterfaceCounters, ...],
    after: tuple[InterfaceCounters, ...],
    seconds: float,
) -> list[dict[str, object]]:
    # On loopback all hosts share one interface: one row, not the same figures once per
    # host.
    names = hosts.names if hosts.shaped else ("all hosts",)
    rows: list[dict[str, object]] = []
    for name, then, now in zip(names, before, after, strict=False):
        sent = now.since(then)
        rows.append(
            {
                "name": name,
                "tx_bytes": sent.tx_bytes,
                "rx_bytes": sent.rx_bytes,
                "run_s": round(seconds, 3),
            }
        )
    return rows


@app.command()
def check(
    rate: Annotated[str | None, option("Measure links of this rate.")] = None,
    delay: Delay = 0.0,
    jitter: Jitter = 0.0,
    up: Up = None,
    down: Down = None,
    mtu: Annotated[int, option("Largest packet in bytes.")] = 1500,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Try whether this machine can make shaped hosts; exit code 1 where it cannot.

    With a rate or a delay: also measure round trip and rate of two hosts, in about ten
    seconds. The exit code is 1 where the round trip is off by more than 5 % and 0.5 ms,
    or the rate by more than 5 %.
    """
    settings = Testbed(
        hosts=2,
        rate_bytes_per_s=parse_rate(rate or "500mbit"),
        mtu=mtu,
        wide_area=read_wide_area(delay, jitter, up, down, None),
    )
    found = available(settings)
    rows: list[dict[str, object]] = [
        {"name": "testbed", "kind": found.kind, "reason": found.reason}
    ]
    is_good = bool(found)
    if found and (rate or settings.wide_area != NEAR):
        checked = check_links(settings)
        is_good = checked.has_round_trip and checked.has_rate
        rows = checked.rows()
    emit("testbed check", rows, as_json=json, title=f"testbed{settings.wide_area}")
    raise typer.Exit(0 if is_good else 1)
