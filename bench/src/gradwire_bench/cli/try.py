"""See methods train on this machine or on two: no root, a live page in the browser."""

import os
import shlex
import socket
import sys
import webbrowser
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.commands.doctor import interfaces
from gradwire.cli.report.output import emit, progress
from gradwire.contract.units import parse_rate
from gradwire.errors import invalid
from gradwire.measure.group import launched_group

from ..report.fractions import Fractions
from ..report.live import LivePage
from ..testbed.wide_area import NEAR, WideArea
from ..training import training_links
from ..training.training import TrainBench
from ..training.training_links import LinksResult, TrainingOnLinks
from ._options import NumSteps, option, with_links

app = typer.Typer()

METHODS = {
    "ddp": "DDP, AdamW",
    "ddp-muon": "DDP, Muon",
    "muon-4bit": "gradwire 4 bits, Muon",
    "muloco-4bit@5": "gradwire local steps, Muon",
}
"""The methods that are compared, and what the page calls them."""
_EVERY = 5
"""Steps of a turn; methods are scored after each."""
_FAR = WideArea(delay_s=0.04)
_JOIN_TIMEOUT = timedelta(minutes=10)
_PORT = 29531


@app.command("try")
@with_links
def try_here(
    wide_area: WideArea,
    far: Annotated[
        bool, option("4 ranks, 50mbit, 80 ms there and back.", "--far")
    ] = False,
    join: Annotated[
        str | None,
        option("Two machines: the address of the first; type it on both."),
    ] = None,
    rate: Annotated[str | None, option("Rate of each rank's link [100mbit].")] = None,
    steps: NumSteps = 60,
    out: Annotated[Path, option("Folder for the page.")] = Path("gradwire-try"),
    browser: Annotated[bool, option("Open the page in a browser.")] = True,
) -> None:
    """Train a small model by four methods, and show the loss over seconds meanwhile.

    Ranks train on this machine behind slow links. A relay in user space limits their
    rates, so this needs neither root nor network namespaces. It takes about three
    minutes. With --join two machines train on the link between them.
    """
    if join is not None and (far or rate or wide_area != NEAR):
        why = "no --far, --rate or other option of links, as the link is real"
        raise invalid("--join", join, why, "leave them out")
    if far and wide_area == NEAR:
        wide_area = _FAR
    rate = rate or ("50mbit" if far else "100mbit")
    num_ranks = 4 if far else 2
    place = f"{num_ranks} ranks at {rate}{wide_area}"
    if join is not None:
        place = f"2 machines, this one and {join}"
    page = LivePage(
        folder=out,
        methods=list(METHODS.values()),
        place=f"An LSTM learns to write, on {place}.",
        steps=steps,
        command=shlex.join(["gradwire", *sys.argv[1:]]),
    )
    links = TrainingOnLinks(
        bench=TrainBench(
            tasks=("lstm",), ranks=num_ranks, steps=steps, trained=tuple(METHODS)
        ),
        rates_bytes_per_s=(parse_rate(rate),),
        goal_step=steps * 3 // 4 // _EVERY * _EVERY,
        wide_area=wide_area,
        every=_EVERY,
        live=page,
        relayed=True,
    )
    if join is None:
        train(links, page, place, browser=browser)
    else:
        _train_with(join, links, page, place, browser=browser)


def train(
    links: TrainingOnLinks, page: LivePage, place: str, *, browser: bool
) -> LinksResult:
    """Trains behind a relay while the page shows it; prints the table."""
    _open(page, browser=browser)
    with progress("try", total=1) as advance:
        outcome = training_links.run(links, Fractions(advance))
    _close(outcome, page, place)
    return outcome


def _open(page: LivePage, *, browser: bool) -> None:
    page.begin()
    typer.echo(f"loss over seconds: {page.path.resolve()}", err=True)
    if browser:
        webbrowser.open(page.path.resolve().as_uri())


def _close(outcome: LinksResult, page: LivePage, place: str) -> None:
    (lines,) = outcome.points.values()
    points = [[point._asdict() for point in line] for line in lines.values()]
    text = answer(outcome)
    page.end(points, float(str(outcome.rows[0]["goal_loss"])), text)
    hidden = frozenset({"task", "optimizer", "link", "times_rate"})
    emit("try", outcome.rows, as_json=False, title=place, hidden=hidden)
    typer.echo(text)


def answer(outcome: LinksResult) -> str:
    """Sentences that say which method is first at DDP's loss."""
    rows = [row for row in outcome.rows if row["to_goal_s"] is not None]
    first = min(rows, key=lambda row: float(str(row["to_goal_s"])))
    name = METHODS[str(first["name"])]
    first_s = float(str(first["to_goal_s"]))
    ddp_s = float(str(outcome.rows[0]["to_goal_s"]))
    return f"{name}: {first_s:.1f} s to DDP's loss. DDP itself takes {ddp_s:.1f} s."


def _train_with(
    first: str, links: TrainingOnLinks, page: LivePage, place: str, *, browser: bool
) -> None:
    """Trains as one of two machines, of which ``first`` has the store and the page."""
    own = _own_address(first)
    is_first = own == socket.gethostbyname(first)
    named = {
        address: str(row["name"])
        for row in interfaces()
        for address in row["addresses"]  # type: ignore[attr-defined]
    }
    os.environ.setdefault("GLOO_SOCKET_IFNAME", named[own])
    os.environ.update(
        MASTER_ADDR=first,
        MASTER_PORT=str(_PORT),
        RANK=str(int(not is_first)),
        WORLD_SIZE="2",
    )
    other = "the other machine" if is_first else first
    typer.echo(f"waits for {other}; type there: gradwire try --join {first}", err=True)
    with launched_group(timeout=_JOIN_TIMEOUT):
        if is_first:
            _open(page, browser=browser)
        with progress("try", total=1) as advance:
            outcome = training_links.run_here(links, Fractions(advance))
        if is_first:
            _close(outcome, page, place)
        else:
            typer.echo(answer(outcome))


def _own_address(first: str) -> str:
    """The address by which this machine reaches another one, or itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # a datagram socket sends nothing when it connects
            probe.connect((first, _PORT))
        except OSError as problem:
            accepted = "an address that this machine reaches"
            raise invalid("--join", first, accepted, str(problem)) from None
        return str(probe.getsockname()[0])
