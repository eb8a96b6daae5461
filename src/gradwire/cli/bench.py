"""Measure exchanges on shaped links and kernels against the memory's bandwidth."""

from __future__ import annotations

from typing import Annotated

import typer

from ..bench import exchange as exchange_bench
from ..bench import kernel as kernel_bench
from ..errors import invalid
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
    title = f"{hosts} hosts at {rate}, {numel} float32"
    hidden = exchange_bench.CONSTANT
    emit("bench exchange", rows, as_json=as_json, title=title, hidden=hidden)


@app.command()
def kernel(
    numel: Annotated[int, typer.Option(help="Elements of the float32 gradient.")] = 25_000_000,
    threads: Annotated[int, typer.Option(help="OpenMP threads of both sides.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns that are measured, after one more.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the CPU kernels against a copy and against torch, both sides in one run, in turn."""
    for name, value, least in (("numel", numel, 1), ("threads", threads, 1), ("rounds", rounds, 4)):
        if value < least:
            raise invalid(name, value, f"at least {least}", "leave it out")
    with progress("bench kernel"):
        rows = kernel_bench.measure(numel, threads, rounds)
    emit("bench kernel", rows, as_json=as_json, title=f"{numel} float32, {threads} threads")
