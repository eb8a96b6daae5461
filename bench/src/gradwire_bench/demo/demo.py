"""The demo: one model, several ways to average its gradients, on shaped links; with
pictures.
"""

import os
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from gradwire.cli.report import table
from gradwire.cli.report.table import Row
from gradwire.contract.bounds import check_whole
from gradwire.contract.registry import load
from gradwire.contract.trace.span import Trace
from gradwire.contract.units import format_bytes, format_rate
from gradwire.errors import invalid
from gradwire_bench.report.chrome import save_chrome

from ..report import bars, html, race, timeline
from ..testbed.hosts import Testbed, available, relayed_hosts, shaped_hosts
from ..testbed.ranks import Json, Report, run_ranks
from ..testbed.wide_area import NEAR, WideArea
from ..training.tasks import make_task
from .demo_rank import COMPRESSORS, methods

_CONSTANT = frozenset({"num_hosts", "link_bytes_per_s"})
"""Keys that have one value in all rows of a run."""
_RANKS_PER_CORE = 16
_START_S = 10.0
"""Seconds of a core from a rank's start to its first step: imports, models,
connections.
"""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Settings of the demo. Each method takes ``steps`` steps, in ``rounds`` turns."""

    hosts: int = 4
    rate_bytes_per_s: float = 25_000_000.0
    wide_area: WideArea = NEAR
    steps: int = 40
    rounds: int = 4
    task: str = "text"
    compressors: tuple[str, ...] = COMPRESSORS

    def __post_init__(self) -> None:
        check_whole("hosts", self.hosts, "a single host sends nothing", least=2)
        if self.hosts > (most := _RANKS_PER_CORE * _num_cores()):
            accepted = (
                f"at most {most} on {_num_cores()} cores, as each is a process here"
            )
            raise invalid(
                "hosts",
                self.hosts,
                accepted,
                "simulate more: gradwire simulate --ranks",
            )
        least = 2 * self.rounds
        multiple = self.rounds
        check_whole("steps", self.steps, "write 40", least=least, multiple=multiple)
        for name in self.compressors:
            load("compress", name)

    @property
    def start_s(self) -> float:
        """About how long it takes here until the first step."""
        return _START_S * max(1.0, self.hosts / _num_cores())

    @property
    def link_bytes_per_s(self) -> float:
        """The rate of the slowest link."""
        return self.wide_area.least(self.rate_bytes_per_s)

    @property
    def testbed(self) -> Testbed:
        """The hosts that it trains on."""
        return Testbed(
            hosts=self.hosts,
            rate_bytes_per_s=self.rate_bytes_per_s,
            wide_area=self.wide_area,
        )

    @property
    def timeout_s(self) -> float:
        """How long ranks wait for each other: as a link of 100 Mbit/s takes for 250 MB,
        or longer.

        A rank that comes first must not give up before the others have started.
        """
        return 2 * self.start_s * max(1.0, 12.5e6 / self.link_bytes_per_s)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are compared, as the table's rows name them."""
        return ("ddp", "ddp-fp16", *methods(self.compressors))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class DemoResult:
    """Rows of the table, and what pictures are drawn from."""

    rows: list[Row]
    traces: dict[str, Trace]
    losses: dict[str, list[float]]
    step_s: dict[str, list[float]]
    notes: list[str]

    @property
    def hidden(self) -> frozenset[str]:
        """The keys of rows that a table need not show: one value in all rows, or none
        in any.
        """
        valued = {
            key for row in self.rows for key, value in row.items() if value is not None
        }
        return _CONSTANT | {
            key for row in self.rows for key in row if key not in valued
        }


def run(demo: Demo, report: Report) -> DemoResult:
    """Opens the testbed, trains by all methods, and puts the figures together."""
    task = make_task(demo.task)
    settings = {**asdict(demo), "timeout_s": demo.timeout_s}
    opened = shaped_hosts if available(demo.testbed) else relayed_hosts
    with opened(demo.testbed) as hosts:
        results = run_ranks(hosts, f"{__name__}_rank", settings, report=report)
        relayed = hosts.relay_port is not None
    parameters = results[0]["ddp"]["parameters"]
    notes = [
        f"{task.description}; {parameters:,} parameters, "
        f"{format_bytes(4 * parameters)} of gradients; AdamW.",
        f"{demo.hosts} hosts, each one rank, "
        f"{format_rate(demo.rate_bytes_per_s)}{demo.wide_area}; {demo.steps} "
        f"steps a method in {demo.rounds} turns; all methods see the same batches.",
        "step_s is the median of rank 0's steps without the first three; the spread is "
        "from the 20th to the 80th percentile. Bytes are the "
        + (
            "relay's count."
            if relayed
            else "interface's count (one header a large segment)."
        ),
        "density actual is the share of elements in the mean, of messages that select "
        "some: the union over ranks, which is more than one rank selects.",
        "loss is on a held-out batch after the last step.",
    ]
    if relayed:
        notes.append(
            "A relay limits rates in user space, so all ranks share this "
            "machine's cores."
        )
    return DemoResult(
        [_row(demo, method, results) for method in demo.methods],
        {
            m: Trace.merged(Trace.from_json(r[m]["trace"]) for r in results)
            for m in demo.methods
        },
        {m: results[0][m]["losses"] for m in demo.methods},
        {m: results[0][m]["all_step_s"] for m in demo.methods},
        notes,
    )


def _row(demo: Demo, method: str, results: list[Json]) -> Row:
    own = results[0][method]
    ddp = results[0]["ddp"]
    sent = sum(result[method]["sent_bytes"] for result in results) / len(results)
    return {
        "name": method,
        "num_hosts": demo.hosts,
        "link_bytes_per_s": demo.link_bytes_per_s,
        "step_s": own["step_s"],
        "step_p20_s": own["step_p20_s"],
        "step_p80_s": own["step_p80_s"],
        "speedup_vs_ddp": ddp["step_s"] / own["step_s"],
        "wire_bytes_per_step": sent,
        "density_actual": own["density_actual"],
        "loss": own["loss"],
    }


def write_report(
    outcome: DemoResult,
    folder: Path,
    *,
    title: str,
    command: str,
    machine: Row,
) -> Path:
    """Writes one Chrome trace a method, pictures, and the HTML page that holds them
    all.

    Raises ``NotInstalled`` after the traces where a package for the others is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for method, trace in outcome.traces.items():
        save_chrome(trace, folder / f"{method}.trace.json")
    first = {name: _of_rank(trace, 0) for name, trace in outcome.traces.items()}
    pictures = {
        **_losses(outcome, folder),
        "Step time": bars.draw(
            outcome.rows,
            folder / "steps.png",
            keys=("step_s", "speedup_vs_ddp", "wire_bytes_per_step"),
            title="One step, by method",
        ),
        "One step of rank 0": timeline.draw(
            first, folder / "timeline.png", title="One step of rank 0, by method"
        ),
    }
    return html.write(
        folder / "report.html",
        title=title,
        command=command,
        machine=machine,
        rows=table.without(outcome.rows, outcome.hidden),
        pictures=pictures,
        notes=outcome.notes,
        answer=answer(outcome),
    )


def _losses(outcome: DemoResult, folder: Path) -> dict[str, Path]:
    """The pictures of losses over seconds and steps."""
    single = _over_seconds(outcome, 1)
    over = _num_smoothed(outcome)
    series = _over_seconds(outcome, over)
    first, _ = race.first_to(series, race.goal_of(series["ddp"]))
    return {
        "Who reaches each training loss first": race.draw_firsts(
            series,
            folder / "first.png",
            title=f"{_where(outcome)}{first} wins",
            beside="ddp",
        ),
        f"Training loss over seconds and steps: mean of {over} steps": race.draw(
            series, single, folder / "loss.png", title="Training loss", beside="ddp"
        ),
    }


def answer(outcome: DemoResult) -> str:
    """Sentences that say who trains fastest: who is first at a loss that DDP has before
    its end.
    """
    series = _over_seconds(outcome, _num_smoothed(outcome))
    goal = race.goal_of(series["ddp"])
    first, first_s = race.first_to(series, goal)
    _, ddp_s = race.first_to({"ddp": series["ddp"]}, goal)
    said = (
        f"The goal is a training loss of {goal:.2f}: DDP stays at or below it in its "
        "last "
    )
    said += (
        f"quarter. {_where(outcome)}{first} is the first there, after {first_s:.1f} "
        "s; DDP "
    )
    said += f"takes {ddp_s:.1f} s."
    if late := [
        name for name, points in series.items() if min(y for _, y in points) > goal
    ]:
        said += (
            f" In {len(series['ddp'])} steps these do not get there: {', '.join(late)}."
        )
    return said


def _where(outcome: DemoResult) -> str:
    link = outcome.rows[0].get("link_bytes_per_s")
    return f"At {format_rate(link)} " if isinstance(link, float) else "Here "


def _num_smoothed(outcome: DemoResult) -> int:
    """The steps of which a line shows the mean loss."""
    return max(1, len(outcome.losses["ddp"]) // 8)


def _over_seconds(outcome: DemoResult, num_smoothed: int) -> race.Series:
    """Each method's losses, as means of the last steps, over its seconds."""
    return {
        method: list(zip(accumulate(outcome.step_s[method]), means, strict=True))
        for method, losses in outcome.losses.items()
        for means in [race.smoothed(losses, num_smoothed)]
    }


def _of_rank(trace: Trace, rank: int) -> Trace:
    return trace.only(lambda span: span.rank == rank)
