"""Verbs of ``gradwire bench`` that train: by auto, by several methods, and without a
network.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.report.output import AsJson, emit, progress
from gradwire.contract.units import parse_rate

from ..auto import auto as auto_bench
from ..faults import accidents
from ..faults import faults as faults_bench
from ..faults.faults_judge import COLUMNS
from ..report.fractions import Fractions
from ..testbed.wide_area import NEAR, WideArea
from ..training import training as training_bench
from ..training import training_links
from ..training.trainers import PERIOD
from ._options import (
    Delay,
    LinkRate,
    Names,
    SingleRankHosts,
    TaskName,
    Turns,
    option,
    run_and_show,
    with_links,
)


@with_links
def auto(
    wide_area: WideArea,
    model: Annotated[
        Names,
        option(f"One of {', '.join(auto_bench.MODELS)}; all."),
    ] = None,
    rate: Annotated[
        Names,
        option("Rate of each host's link, or loopback. [25, 100, 500mbit, 2gbit, it]"),
    ] = None,
    hosts: SingleRankHosts = 4,
    steps: Annotated[int, option("Steps of each turn, at least.")] = 3,
    turn_s: Annotated[float, option("Seconds of each turn, about.")] = 2.0,
    rounds: Turns = 3,
    under: Annotated[str, option("plain or ddp: what is attached.")] = "plain",
    fidelity: Annotated[str, option("exact, half, safe or any.")] = "safe",
    single: Annotated[
        Names,
        option("Only this single exchange; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train models by auto, by DDP and by single exchanges of its fidelity, in turn.

    Each cell is told as it ends, and all in a Markdown table: auto's speedup over DDP,
    the best single exchange's, how far auto's prediction is off, how busy auto keeps
    the cores.
    """
    settings = auto_bench.AutoBench(
        models=tuple(model or auto_bench.MODELS),
        rates=tuple(_links(rate)) or _default_rates(wide_area),
        wide_area=wide_area,
        hosts=hosts,
        steps=steps,
        turn_s=turn_s,
        rounds=rounds,
        under=under,
        fidelity=fidelity,
        singles=tuple(single or ()),
    )
    with progress("bench auto", total=1) as advance:
        rows, notes = auto_bench.run(
            settings, Fractions(advance), announce=partial(typer.echo, err=True)
        )
    notes = [*notes, auto_bench.cells_table(settings, rows)]
    title = f"{hosts} hosts{wide_area}, {under}, fidelity {fidelity}"
    hidden = auto_bench.CONSTANT
    emit("bench auto", rows, as_json=as_json, title=title, hidden=hidden, notes=notes)


def _default_rates(links: WideArea) -> tuple[float | None, ...]:
    """Rates of `bench auto`; the loopback is no far link."""
    is_equal = links == NEAR
    return tuple(rate for rate in auto_bench.RATES if is_equal or rate is not None)


def _links(rates: Names) -> list[float | None]:
    """Bytes per second of each link; None is the loopback, which nothing slows."""
    return [None if rate == "loopback" else parse_rate(rate) for rate in rates or ()]


@with_links
def train(
    wide_area: WideArea,
    task: Annotated[
        Names,
        option("gpt, lstm, convnet or a task of the demo [gpt]."),
    ] = None,
    optimizer: Annotated[Names, option("adamw or sgd, with momentum [adamw].")] = None,
    rate: Annotated[
        Names,
        option("A link's rate; seconds are measured on such links."),
    ] = None,
    ranks: Annotated[int, option("Replicas in this process, or hosts.")] = 4,
    steps: Annotated[int, option("Steps of each training.")] = 400,
    seeds: Annotated[int, option("Draws of first values and batches.")] = 1,
    learning_rates: Annotated[
        int,
        option("Rates that each method may choose from, twice one another."),
    ] = 1,
    goal_step: Annotated[
        int | None,
        option("With --rate: DDP's loss here is the goal [3/4 of steps]."),
    ] = None,
    only: Annotated[
        Names,
        option("topk(density=0.1), adapt:topk, local_steps@5."),
    ] = None,
    out: Annotated[
        Path | None,
        option("With --rate: a folder for pictures of the losses."),
    ] = None,
    peers: Annotated[list[Path] | None, option("A folder of peers' packages.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train small models by several methods: the loss after as many steps, or over
    seconds.

    Without --rate every compressor trains with its defaults, in one process. With it
    DDP, its hooks and a few compressors train on hosts, in turn; a row says when a
    method reached the goal. Most options may be repeated. times_rate is the best
    learning rate over the task's.
    """
    settings = training_bench.TrainBench(
        tasks=tuple(task or ["gpt"]),
        optimizers=tuple(optimizer or ["adamw"]),
        ranks=ranks,
        steps=steps,
        seeds=seeds,
        learning_rates=learning_rates,
        trained=tuple(only or ()),
    )
    on_links = rate or goal_step is not None or out is not None or peers
    if on_links or wide_area != NEAR:
        _train_on_links(
            settings, _links(rate), wide_area, goal_step, peers or [], out, as_json
        )
        return
    hidden = training_bench.hidden(settings)
    run = training_bench.run
    run_and_show("bench train", run, settings, settings.title, as_json, hidden)


def _train_on_links(
    settings: training_bench.TrainBench,
    rates: list[float | None],
    wide_area: WideArea,
    goal_step: int | None,
    peers: list[Path],
    out: Path | None,
    as_json: bool,
) -> None:
    links = training_links.TrainingOnLinks(
        bench=settings,
        rates_bytes_per_s=tuple(rates),
        wide_area=wide_area,
        goal_step=settings.steps * 3 // 4 // PERIOD * PERIOD
        if goal_step is None
        else goal_step,
        peers=tuple(str(folder.absolute()) for folder in peers),
    )
    with progress("bench train", total=1) as advance:
        outcome = training_links.run(links, Fractions(advance))
    hidden = training_bench.hidden(settings)
    title = training_links.title(links)
    emit("bench train", outcome.rows, as_json=as_json, title=title, hidden=hidden)
    if out is not None:
        training_links.draw(outcome, out)


def loopback(
    ranks: Annotated[int, option("Processes that train, on this machine.")] = 2,
    task: TaskName = "perceptron",
    turns: Annotated[int, option("How often each side has its turn.")] = 8,
    iterations: Annotated[int, option("Steps that a turn measures.")] = 10,
    only: Annotated[
        Names,
        option("Compressors [default: none, which is dense]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time training steps where the network costs nothing, in turn with DDP's.

    ddp+ is a DDP model that is attached; processor_s the work of a rank's threads in
    one step, and switches how often they went to sleep in it.
    """
    from ..runs import loopback as bench

    settings = bench.LoopbackBench(
        ranks=ranks,
        task=task,
        turns=turns,
        iterations=iterations,
        compressors=tuple(only or ["none"]),
    )
    title = f"{task}, {ranks} ranks on unshaped loopback"
    run_and_show("bench loopback", bench.run, settings, title, as_json, {"num_hosts"})


@with_links
def faults(
    wide_area: WideArea,
    trials: Annotated[int, typer.Option(help="How many trials.")] = 24,
    seed: Annotated[int, typer.Option(help="All of them are drawn from it.")] = 0,
    at_once: Annotated[
        int, typer.Option(help="Trials, of four ranks, that run at one time.")
    ] = 4,
    only: Annotated[
        Names,
        typer.Option(help=f"One of {', '.join(accidents.KINDS)}; may be repeated."),
    ] = None,
    way: Annotated[
        Names,
        typer.Option(help=f"One of {', '.join(accidents.WAYS)}; may be repeated."),
    ] = None,
    local_steps: Annotated[
        bool, typer.Option("--local-steps", help="Under local steps with a quorum.")
    ] = False,
    number: Annotated[
        int | None, typer.Option(help="Only the trial of this number.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank waits for a peer.")
    ] = 5.0,
    check_every: Annotated[
        int, typer.Option(help="Steps to a check of parameters; 0: never.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Kill, cut off and spoil ranks that train, and see what the others make of it.

    Exits with 1 if anything is wrong: hangs (no end), late (more than 5 s after the
    time-out), raw (an error of others), diverged (without an error), misnamed (at most
    that share, by Wilson's 95 %), owed (local steps that the model lacks, or has
    twice), apart (steps differ), left (a process stays), not_struck. Seconds are those
    to detect; next is from a rank's end to the next whole step of others, or their next
    merge. With options of links all trials run on such hosts, whose other links have
    500 Mbit/s.
    """
    settings = faults_bench.FaultsBench(
        trials=trials,
        seed=seed,
        at_once=at_once,
        only=tuple(only or ()),
        ways=(accidents.LOCAL,) if local_steps else tuple(way or ()),
        number=number,
        timeout_s=timeout,
        check_every=check_every or None,
        wide_area=wide_area,
    )
    with progress("bench faults", total=1) as advance:
        rows, notes = faults_bench.run(settings, Fractions(advance))
    title = f"{trials} trials of seed {seed}, time-out {timeout:g} s"
    title += str(settings.wide_area)
    emit("bench faults", rows, as_json=as_json, title=title, notes=notes)
    if any(rows[-1][column] for column in COLUMNS):
        raise typer.Exit(1)


def storm(
    hosts: SingleRankHosts = 8,
    seconds: Annotated[int, option("The storm's length under each way.")] = 600,
    quick: Annotated[
        bool, option("A minute, four hosts, short steps.", "--quick")
    ] = False,
    seed: Annotated[int, option("All faults are drawn from it.")] = 7,
    times: Annotated[float, option("Faults over those of ft-diloco's storm.")] = 1.0,
    kill_every: Annotated[float, option("Kills at this distance, in seconds.")] = 0.0,
    width: Annotated[int, option("The model's width.")] = 128,
    every: Annotated[int, option("Local steps between two exchanges.")] = 24,
    rate: LinkRate = "50mbit",
    delay: Delay = 40.0,
    way: Annotated[Names, option("Only this way; may be repeated.")] = None,
    out: Annotated[Path | None, option("A folder for the record and its page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Kill, stop and cut off ranks on a published schedule, under three ways to train.

    DDP starts again from its last checkpoint, torchft's DiLoCo has its Lighthouse, and
    gradwire has a quorum of half. Ranks have speeds of 1 to 4. counted is the share of
    all ranks' seconds in steps that ended in the model, lost in steps that did not.
    closed is the share of attempts to be in a round that took effect, in the ranks
    that a round has, and back the seconds until a killed rank's work is in one again;
    trains and counts are seconds from its new process to its first step, and to such a
    round.
    """
    from ..storm import storm as bench
    from ..storm.schedule import StormBench

    settings = StormBench(
        hosts=hosts,
        seconds=seconds,
        seed=seed,
        times=times,
        kill_every_s=kill_every,
        width=width,
        every=every,
        rate_bytes_per_s=parse_rate(rate),
        delay_s=delay / 1e3,
        ways=tuple(way or ()),
    )
    if quick:
        settings = replace(settings, hosts=4, seconds=60, step_s=0.2, every=12)
    with progress("bench storm", total=1) as advance:
        record = bench.run(settings, Fractions(advance))
    title = f"{settings.hosts} hosts, {settings.seconds} s, seed {seed}, {rate}"
    rows = record["rows"]
    emit("bench storm", rows, as_json=as_json, title=title, notes=record["notes"])
    if out is not None:
        bench.write(record, out)
