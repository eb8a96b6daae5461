"""Loss over seconds and over bytes: models trained on shaped links by each method, in
one run.

Each rank is a process on a host of its own. A row says when a method reached the loss
that DistributedDataParallel has at a given step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isnan
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.cli.report.table import Row
from gradwire.contract.bounds import check_whole
from gradwire.contract.units import format_rate
from gradwire.errors import invalid

from ..report import curves
from ..report.live import LivePage
from ..testbed.hosts import Testbed, loopback_hosts, open_hosts, relayed_hosts
from ..testbed.ranks import Json, Report, run_ranks
from ..testbed.wide_area import NEAR, WideArea, refuse_loopback
from .peers import PEERS, is_there
from .tasks import make_task
from .trainers import DDP, OTHERS, PERIOD, check_trainer, split_period
from .training import TrainBench
from .training_links_rank import measure

METHODS = (*OTHERS, *PEERS, "dense", "int8", "qsgd", "onebit", "topk", "powersgd")
"""The trainers that are compared unless others are named."""


class Point(NamedTuple):
    """How far a training is: steps, seconds and bytes a rank, means over ranks;
    held-out loss.
    """

    step: float
    seconds: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class TrainingOnLinks:
    """Settings of ``bench train --rate``: ``bench`` with ``ranks`` hosts, on links of
    each rate.

    Rates are bytes per second; None is the loopback, which nothing slows. The goal is
    DDP's held-out loss at ``goal_step``. A method's learning rate is chosen on the
    fastest link, by the loss of the first seed after the last step. ``peers`` are
    folders that packages of others are imported from; a row says which are not there.
    Methods take turns of ``every`` steps, and are scored after each. ``live`` is a page
    that shows their losses meanwhile. ``relayed``: a relay limits rates, also where the
    machine has network namespaces.
    """

    bench: TrainBench
    rates_bytes_per_s: tuple[float | None, ...]
    goal_step: int
    peers: tuple[str, ...] = ()
    wide_area: WideArea = NEAR
    every: int = PERIOD
    live: LivePage | None = None
    relayed: bool = False

    def __post_init__(self) -> None:
        refuse_loopback(self.rates_bytes_per_s, self.wide_area)
        if not self.rates_bytes_per_s:
            why = "one or more, as a goal and pictures are of links"
            raise invalid("rates of links", "none", why, "write --rate 100mbit")
        steps = self.bench.steps
        every = self.every
        check_whole("steps", steps, "write 400", least=2 * every, multiple=every)
        if not 0 < self.goal_step <= steps or self.goal_step % every:
            accepted = f"a multiple of {every}, at most {steps}"
            raise invalid("goal step", self.goal_step, accepted, "leave it out")
        for name in self.methods:
            check_trainer(name)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of all trainers, DDP first."""
        return (DDP, *(name for name in self.bench.trained or METHODS if name != DDP))

    @property
    def missing(self) -> tuple[str, ...]:
        """The peers among them whose packages are not there."""
        bases = {name: split_period(name)[0] for name in self.methods}
        asked = (name for name, base in bases.items() if base in PEERS)
        return tuple(name for name in asked if not is_there(bases[name], self.peers))


@dataclass(frozen=True)
class LinksResult:
    """Rows of the table, and what pictures are drawn from: curves by link and
    method.
    """

    rows: list[Row]
    points: dict[str, dict[str, list[Point]]]


Entrant = tuple[str, float]
"""A method, and the factor of the task's learning rate."""


def run(links: TrainingOnLinks, report: Report) -> LinksResult:
    """Trains each task by each optimizer on each link; rows in the order of the
    settings.
    """
    bench = links.bench
    rows = []
    points = {}
    rates = sorted(links.rates_bytes_per_s, key=lambda rate: rate or inf, reverse=True)
    kinds = [
        (task, optimizer) for task in bench.tasks for optimizer in bench.optimizers
    ]
    total = len(kinds) * len(rates) * bench.seeds
    done = 0

    def part(fraction: float, what: str) -> None:
        report((done + fraction) / total, what)

    for task, optimizer in kinds:
        trained = [name for name in links.methods if name not in links.missing]
        entrants: list[Entrant] = [(m, f) for m in trained for f in bench.factors]
        for rate in rates:
            found: list[list[list[Point]]] = []
            for seed in range(bench.seeds):
                of_seed, link = _trained(
                    links, task, optimizer, rate, seed, entrants, part
                )
                if len(entrants) > len(trained):
                    entrants, of_seed = _best(trained, entrants, of_seed)
                found.append(of_seed)
                done += 1
            kind = {"task": task, "optimizer": optimizer, "link": link}
            rows += [{**kind, **row} for row in _rows(links, entrants, found)]
            rows += [
                {**kind, "name": f"{name}: not installed"} for name in links.missing
            ]
            names = [name for name, _ in entrants]
            points[", ".join(kind.values())] = dict(zip(names, found[0], strict=True))
    return LinksResult(rows, points)


def _trained(
    links: TrainingOnLinks,
    task: str,
    optimizer: str,
    rate: float | None,
    seed: int,
    entrants: Sequence[Entrant],
    report: Report,
) -> tuple[list[list[Point]], str]:
    """The points of each entrant, and the link in words."""
    settings = _settings(links, task, optimizer, seed, entrants)
    with _hosts(links, rate) as hosts:
        results = run_ranks(
            hosts,
            f"{__package__}.training_links_rank",
            settings,
            report=report,
        )
        shaped = hosts.shaped
    link = (
        f"{format_rate(rate)}{links.wide_area}"
        if rate and shaped
        else "unshaped loopback"
    )
    # loopback counts the bytes of all ranks together
    shared = 1 if shaped else len(results)
    return [_merged(of_ranks, shared) for of_ranks in zip(*results, strict=True)], link


def _settings(
    links: TrainingOnLinks,
    task: str,
    optimizer: str,
    seed: int,
    entrants: Sequence[Entrant],
) -> Json:
    return {
        "task": task,
        "optimizer": optimizer,
        "seed": seed,
        "steps": links.bench.steps,
        "every": links.every,
        "entrants": entrants,
        "peers": links.peers,
        "live": str(links.live.points) if links.live else None,
    }


def run_here(links: TrainingOnLinks, report: Report) -> LinksResult:
    """Trains on the link between this process and others, each of which calls this.

    The default process group is theirs. Trains the first task, at its own rate.
    """
    bench = links.bench
    entrants = [(name, 1.0) for name in links.methods]
    task = bench.tasks[0]
    optimizer = bench.optimizers[0]
    lines = measure(_settings(links, task, optimizer, 0, entrants), report)
    figures = [[list(point.values()) for point in line] for line in lines]
    mine = torch.tensor(figures, dtype=torch.float64)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    means = torch.stack(of_ranks).mean(0)
    # rank 0 alone has losses
    means[..., -1] = of_ranks[0][..., -1]
    trained = [[Point(*point) for point in line] for line in means.tolist()]
    points = dict(zip(links.methods, trained, strict=True))
    return LinksResult(_rows(links, entrants, [trained]), {"this link": points})


def _hosts(links: TrainingOnLinks, rate: float | None) -> Any:
    if rate is None:
        return loopback_hosts(Testbed(hosts=links.bench.ranks))
    testbed = Testbed(
        hosts=links.bench.ranks, rate_bytes_per_s=rate, wide_area=links.wide_area
    )
    if links.relayed:
        return relayed_hosts(testbed)
    return open_hosts(testbed)


def _merged(of_ranks: Sequence[Sequence[dict[str, float]]], shared: int) -> list[Point]:
    """One entrant's points as all ranks saw them."""
    points = []
    for at in zip(*of_ranks, strict=True):
        seconds = mean(point["seconds"] for point in at)
        sent_bytes = mean(point["sent_bytes"] for point in at)
        first = at[0]
        points.append(Point(first["step"], seconds, sent_bytes / shared, first["loss"]))
    return points


def _best(
    methods: Sequence[str], entrants: Sequence[Entrant], trained: Sequence[list[Point]]
) -> tuple[list[Entrant], list[list[Point]]]:
    """Each method's entrant of the least loss in the end, with its points."""
    kept = []
    for name in methods:
        places = [place for place, entrant in enumerate(entrants) if entrant[0] == name]
        ends = {place: trained[place][-1].loss for place in places}
        kept.append(min(ends, key=lambda place: (isnan(ends[place]), ends[place])))
    return [entrants[place] for place in kept], [trained[place] for place in kept]


def reached(points: Sequence[Point], goal: float) -> Point | None:
    """The first moment at which the line through the points is at the goal; None if it
    never is.

    >>> reached([Point(0, 0.0, 0.0, 5.0), Point(10, 2.0, 80.0, 3.0)], 4.0)
    Point(step=5.0, seconds=1.0, sent_bytes=40.0, loss=4.0)
    """
    for before, after in pairwise(points):
        if after.loss <= goal < before.loss:
            share = (before.loss - goal) / (before.loss - after.loss)
            return Point(
                *(a + share * (b - a) for a, b in zip(before, after, strict=True))
            )
    return None


def _rows(
    links: TrainingOnLinks,
    entrants: Sequence[Entrant],
    found: Sequence[Sequence[list[Point]]],
) -> list[Row]:
    """One row a method: means over seeds, each seed with the goal that its own DDP
    sets.
    """
    goals = [trained[0][links.goal_step // links.every].loss for trained in found]
    ddp_s: float | None = None
    rows: list[Row] = []
    for place, (name, factor) in enumerate(entrants):
        trained = [of_seed[place] for of_seed in found]
        there = [
            reached(points, goal) for points, goal in zip(trained, goals, strict=True)
        ]
        at = [point for point in there if point is not None]
        all_there = len(at) == len(there)
        seconds = mean(point.seconds for point in at) if all_there else None
        ddp_s = seconds if place == 0 else ddp_s
        ends = [points[-1] for points in trained]
        rows.append(
            {
                "name": name,
                "goal_loss": mean(goals),
                "to_goal_s": seconds,
                "speedup_vs_ddp": ddp_s / seconds if ddp_s and seconds else None,
                "to_goal_steps": mean(point.step for point in at)
                if all_there
                else None,
                "to_goal_bytes": mean(point.sent_bytes for point in at)
                if all_there
                else None,
                "step_s": mean(end.seconds / end.step for end in ends),
                "sent_bytes_per_step": mean(end.sent_bytes / end.step for end in ends),
                "loss": mean(end.loss for end in ends),
                "times_rate": factor,
            }
        )
    return rows


def draw(result: LinksResult, folder: Path) -> list[Path]:
    """Pictures of loss over seconds and over bytes, with a panel for each link."""
    folder.mkdir(parents=True, exist_ok=True)
    axes = {"seconds": (1, 1.0, "seconds"), "bytes": (2, 1e-6, "MB sent by a rank")}
    return [
        curves.draw_panels(
            {
                link: {
                    name: [(point[place] * unit, point.loss) for point in points]
                    for name, points in methods.items()
                }
                for link, methods in result.points.items()
            },
            folder / f"loss-over-{what}.png",
            title=f"Held-out loss over {what}",
            x_label=label,
            y_label="cross-entropy (nats)",
        )
        for what, (place, unit, label) in axes.items()
    ]


def title(links: TrainingOnLinks) -> str:
    """The tasks, settings and goal in words."""
    bench = links.bench
    tasks = "; ".join(make_task(name).description for name in bench.tasks)
    return (
        f"{tasks}; {bench.ranks} hosts, {bench.steps} steps, {bench.seeds} seeds; the "
        f"goal is DDP's held-out loss at step {links.goal_step}"
    )
