"""Measure exchanges and schedulers on shaped links, kernels against the memory's
bandwidth.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from gradwire.cli.report.output import AsJson, emit, progress
from gradwire.contract.bounds import check_whole
from gradwire.contract.units import parse_rate
from gradwire.errors import invalid

from ..micro import exchange as exchange_bench
from ..micro import kernel as kernel_bench
from ..micro import sparse as sparse_bench
from ..micro.draws import IndexDraws, draws_like
from ..micro.sparse_rank import OWN, SCHEMES
from ..report.fractions import Fractions
from ..schedule import schedule as schedule_bench
from ..testbed.wide_area import WideArea
from . import _bench_training as of_training
from ._bench_device import device
from ._options import (
    Compressors,
    Device,
    LinkRate,
    Names,
    NumElements,
    NumHosts,
    Planners,
    RanksPerHost,
    SingleRankHosts,
    Turns,
    option,
    run_and_show,
    with_links,
)

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure exchanges and schedulers on shaped links, kernels against the memory's
    bandwidth.
    """


for verb in (
    of_training.auto,
    of_training.train,
    of_training.loopback,
    of_training.faults,
    of_training.storm,
    device,
):
    app.command()(verb)


@app.command()
@with_links
def exchange(
    wide_area: WideArea,
    hosts: NumHosts = 4,
    ranks_per_host: RanksPerHost = 1,
    rate: LinkRate = "500mbit",
    numel: NumElements = 10_000_000,
    repeats: Turns = 7,
    only: Annotated[
        Names,
        option("A compressor or exchange; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time one gradient through every exchange, encode and decode included.

    floor is the bytes of the exchange's formula over the link's rate. Where hosts have
    several ranks: also with -on_hosts, that is with each host's gradients added up
    first.
    """
    settings = exchange_bench.ExchangeBench(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        rate_bytes_per_s=parse_rate(rate),
        wide_area=wide_area,
        numel=numel,
        repeats=repeats,
        only=tuple(only or ()),
    )
    ranks = f" of {ranks_per_host} ranks" if ranks_per_host > 1 else ""
    title = f"{hosts} hosts{ranks} at {rate}{settings.wide_area}, {numel} float32"
    hidden = exchange_bench.CONSTANT
    run_and_show("bench exchange", exchange_bench.run, settings, title, as_json, hidden)


@app.command()
@with_links
def sparse(
    wide_area: WideArea,
    hosts: SingleRankHosts = 8,
    rate: LinkRate = "200mbit",
    numel: NumElements = 10_000_000,
    density: Annotated[float, option("Share of them that each rank takes.")] = 0.01,
    overlap: Annotated[float, option("Share of these that two ranks share.")] = 0.3,
    skew: Annotated[
        float | None,
        option("Density of the first 1/hosts over the mean [default: 5, or hosts]."),
    ] = None,
    run: Annotated[int, option("Adjacent elements that are taken together.")] = 1,
    like: Annotated[
        str | None,
        option("Overlap, skew and run of a model: lstm, deepfm or transformer."),
    ] = None,
    repeats: Turns = 7,
    only: Annotated[Names, option("A scheme; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time one sparse gradient through every scheme and the dense all-reduce, in turn.

    bound is the time that the scheme's own bytes take on the link.
    """
    draws = (
        draws_like(like, numel, hosts, density=density)
        if like
        else IndexDraws(
            numel=numel,
            world=hosts,
            density=density,
            overlap=overlap,
            skew=min(5.0, hosts) if skew is None else skew,
            run=run,
        )
    )
    settings = sparse_bench.SparseBench(
        draws=draws,
        rate_bytes_per_s=parse_rate(rate),
        wide_area=wide_area,
        repeats=repeats,
        schemes=tuple(only or (*SCHEMES, *OWN)),
    )
    title = (
        f"{hosts} hosts at {rate}{settings.wide_area}, {density:.2%} of {numel} "
        f"float32, overlap "
        f"{draws.overlap:g}"
    )
    hidden = sparse_bench.CONSTANT
    run_and_show("bench sparse", sparse_bench.run, settings, title, as_json, hidden)


@app.command()
def kernel(
    only: Compressors = None,
    numel: NumElements = 25_000_000,
    threads: Annotated[int, option("OpenMP threads of both sides.")] = 2,
    rounds: Turns = 15,
    device: Device = "cpu",
    compiled: Annotated[
        bool,
        option("Also beside torch.compile, which takes minutes.", "--compiled"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time compressors against a copy and against torch, both sides in one run, in
    turn.

    encode is with error feedback, decode adds to a sum; the -plain ones do neither.
    """
    for name, count, least in (
        ("rounds", rounds, 4),
        ("numel", numel, 1),
        ("threads", threads, 1),
    ):
        check_whole(name, count, "leave it out", least=least)
    _check_device(device)
    from ..micro import kernel_peers

    codecs = kernel_bench.shipped(only or [])
    kinds = ("eager", "compiled") if compiled else ("eager",)
    peers = kernel_peers.peers(kinds, device)
    with progress("bench kernel"):
        rows = kernel_bench.measure(
            numel, threads, rounds, codecs, peers=peers, device=device
        )
    emit(
        "bench kernel",
        rows,
        as_json=as_json,
        title=f"{numel} float32, {threads} threads",
    )


def _check_device(device: str) -> None:
    """Refuses a device that torch does not have here."""
    known = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if device not in known:
        accepted = "cpu, or cuda where torch has one"
        raise invalid("device", device, accepted, "leave it out")


@app.command()
@with_links
def schedule(
    wide_area: WideArea,
    profile: Annotated[
        Names,
        option("A model of the catalogue, or a profile's file."),
    ] = None,
    hosts: NumHosts = 8,
    ranks_per_host: RanksPerHost = 1,
    rate: Annotated[str, option("Rate of the links that are stood for.")] = "10gbit",
    scale: Annotated[float, option("Bytes and rates are divided by this.")] = 16.0,
    slowdown: Annotated[float, option("All seconds are multiplied by this.")] = 4.0,
    turns: Annotated[int, option("How often each planner has its turn.")] = 2,
    iterations: Annotated[int, option("Iterations that a turn measures.")] = 2,
    planner: Planners = None,
    trials: Annotated[int, option("Settings tried where they are tuned.")] = 25,
    picture: Annotated[Path | None, option("Write timelines (PNG) here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay models on shaped links under each planner; measured beside simulated
    seconds.

    The runtime and its bytes are real, computation is waiting for the profile's
    seconds. Bytes are 1/scale of the model's, seconds slowdown times as long, links
    have rate/(scale x slowdown).
    """
    settings = schedule_bench.ScheduleBench(
        profiles=tuple(profile or ["vgg16"]),
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        rate_bytes_per_s=parse_rate(rate),
        wide_area=wide_area,
        scale=scale,
        slowdown=slowdown,
        turns=turns,
        iterations=iterations,
        planners=tuple(planner or schedule_bench.PLANNERS),
        trials=trials,
    )
    with progress("bench schedule", total=1) as advance:
        outcome = schedule_bench.run(settings, Fractions(advance))
    title = settings.title
    hidden = schedule_bench.CONSTANT
    emit("bench schedule", outcome.rows, as_json=as_json, title=title, hidden=hidden)
    if picture is not None:
        schedule_bench.draw(outcome, picture, title=title)
