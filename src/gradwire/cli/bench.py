"""Measure exchanges on shaped links and kernels against the memory's bandwidth."""

from __future__ import annotations

from typing import Annotated

import typer

from ..bench import exchange as exchange_bench
from ..units import parse_rate
from ._output import Fractions, emit, progress

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure exchanges on shaped links and kernels against the memory's bandwidth."""


@app.command()
def exchange(
    hosts: Annotated[int, typer.Option(help="How many hosts, one rank each.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of each host's link.")] = "500mbit",
    numel: Annotated[int, typer.Option(help="Elements of the float32 gradient.")] = 10_000_000,
    repeats: Annotated[int, typer.Option(help="Turns that are measured, after one more.")] = 7,
    pieces: Annotated[int, typer.Option(help="Messages the gradient is cut into.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time one gradient through every exchange, encode and decode included.

    floor is the bytes of the exchange's formula over the link's rate.
    """
    settings = exchange_bench.ExchangeBench(
        hosts=hosts,
        rate_bytes_per_s=parse_rate(rate),
        numel=numel,
        repeats=repeats,
        pieces=pieces,
    )
    with progress("bench exchange", total=1) as advance:
        rows = exchange_bench.run(settings, Fractions(advance))
    emit("bench exchange", rows, as_json=as_json, title=f"{hosts} hosts at {rate}, {numel} float32")
