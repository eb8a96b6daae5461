"""Schedulers compared on shaped links: measured and simulated seconds of one iteration,
by planner.

The runtime, the bytes and the links are real; computation is waiting (see `replay`).
Everything is smaller and slower than in the setting it stands for, by two factors that
are printed with the rows:

- ``scale`` divides bytes and rates alike, so that eight ranks on few cores do not spend
  their time copying. It leaves all seconds as they are.
- ``slowdown`` multiplies all seconds. What a message costs beside its bytes is this
  machine's, not the setting's. US-Byte has 0.91 ms at 8 nodes and 10 Gbit/s. Eight
  ranks on two cores that nobody else uses took 2.5 ms and the bytes' own time for a
  message of 64 KiB or more, and 8.5 ms at least for any (104 Mbit/s, whether 1, 2 or 4
  were on their way at once). Four times slower, that stands for 0.6 and 2.1 ms, on
  either side of the paper's figure. ``alpha_s`` and ``compute_s`` are in the rows.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

from gradwire.cli.report.table import Row
from gradwire.contract.bounds import check_whole
from gradwire.contract.registry import names
from gradwire.contract.trace.span import Trace
from gradwire.contract.units import format_rate
from gradwire.errors import invalid
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.planning.inputs import load_or_read

from ..checks import check_counts, check_names
from ..figures import spread
from ..report import timeline
from ..testbed.hosts import Testbed, shaped_hosts
from ..testbed.ranks import Json, Report, run_ranks
from ..testbed.wide_area import NEAR, WideArea
from .replay import scaled_profile

PLANNERS = ("wfbp", "ddp", "mgwfbp", "bytescheduler", "usbyte", "usbyte_extended")
TUNED = frozenset({"bytescheduler", "usbyte", "usbyte_extended"})
"""Planners whose settings are found by Bayesian optimisation, as the US-Byte paper
finds those of ByteScheduler and its own S_p.
"""
CONSTANT = frozenset(
    {"num_hosts", "link_bytes_per_s", "scale", "slowdown", "beta_s_per_byte"}
)
"""Keys that have one value in all rows of a run, or nearly so."""
BURST_S = 0.001
"""How much of a pause a link makes up for: less than a message costs, which pauses are
made of.
"""
CONGESTION_CONTROL = "reno"
"""Loses nothing to losses here, so that seconds go up with bytes in a straight line:
all-reduces of 1 and 6 MiB on 8 hosts at 104 Mbit/s took 1.08 and 1.06 of 2 (7/8) bytes
/ rate, and 5 packets were dropped; with BBR 1.13 and 1.13, and 466; with BBR and a
queue of 0.15 s 1.07 and 1.14, and none.
"""


@dataclass(frozen=True, kw_only=True)
class ScheduleBench:
    """Settings of ``bench schedule``: what is replayed, and on how much slower links.

    ``profiles`` are names of the catalogue or files. ``rate_bytes_per_s`` is the rate
    of the links that are stood for, and the links here get 1/(``scale`` * ``slowdown``)
    of it, as do other rates of ``wide_area``, whose seconds are ``slowdown`` times as
    long. Each of ``turns`` measures ``iterations`` iterations of each planner.
    ``trials`` is how many settings are tried where they are tuned.
    """

    profiles: tuple[str, ...] = ("vgg16",)
    hosts: int = 8
    ranks_per_host: int = 1
    rate_bytes_per_s: float = 1.25e9
    wide_area: WideArea = NEAR
    scale: float = 16.0
    slowdown: float = 4.0
    turns: int = 2
    iterations: int = 2
    planners: tuple[str, ...] = PLANNERS
    trials: int = 25

    def __post_init__(self) -> None:
        check_whole("hosts", self.hosts, "a single host sends nothing", least=2)
        check_counts(self, ranks_per_host=1, turns=1, iterations=1, trials=1)
        for name in ("scale", "slowdown"):
            if not 0 < getattr(self, name) < float("inf"):
                raise invalid(
                    name, getattr(self, name), "a positive number", "leave it out"
                )
        for what in ("profiles", "planners"):
            given = getattr(self, what)
            if not given or len(set(given)) < len(given):
                raise invalid(what, given, "one or more, each once", "leave it out")
        check_names("planner", self.planners, names("planner"))

    @property
    def link_bytes_per_s(self) -> float:
        """The rate of the links that are really made."""
        return self.rate_bytes_per_s / (self.scale * self.slowdown)

    @property
    def title(self) -> str:
        return (
            f"{self.hosts} "
            f"hosts{f' of {self.ranks_per_host} ranks' * (self.ranks_per_host > 1)} "
            f"at {format_rate(self.rate_bytes_per_s)}{self.wide_area}: "
            f"1/{self.scale:g} of the bytes, "
            f"{self.slowdown:g} times the seconds, on "
            f"{format_rate(self.link_bytes_per_s)}"
        )

    @property
    def testbed(self) -> Testbed:
        """The hosts that are really made."""
        scaled = self.wide_area.scaled(
            rates=1 / (self.scale * self.slowdown), seconds=self.slowdown
        )
        return Testbed(
            hosts=self.hosts,
            ranks_per_host=self.ranks_per_host,
            rate_bytes_per_s=self.link_bytes_per_s,
            burst_s=BURST_S,
            congestion_control=CONGESTION_CONTROL,
            wide_area=scaled,
        )

    def rows(self) -> list[Json]:
        """The rows of the table: each is a name, a planner, its settings, and whether
        to tune.
        """
        return [
            {
                "name": planner,
                "planner": planner,
                "settings": {},
                "tune": planner in TUNED,
            }
            for planner in self.planners
        ]


@dataclass(frozen=True)
class ScheduleResult:
    """Rows of the table, and by model and row the traces of one iteration: measured,
    simulated.
    """

    rows: list[Row]
    measured: dict[str, dict[str, Trace]] = field(default_factory=dict)
    simulated: dict[str, dict[str, Trace]] = field(default_factory=dict)


def run(bench: ScheduleBench, report: Report) -> ScheduleResult:
    """Replays every profile under every planner on shaped hosts.

    Raises ``TestbedUnavailable`` where links cannot be shaped: at full speed of the
    loopback, the figures would stand for nothing.
    """
    profiles = [load_or_read(name) for name in bench.profiles]
    settings = {
        **asdict(bench),
        "profiles": [profile.to_json() for profile in profiles],
        "rows": bench.rows(),
        "rate_bytes_per_s": bench.link_bytes_per_s,
    }
    with shaped_hosts(bench.testbed) as hosts:
        results = run_ranks(hosts, f"{__name__}_rank", settings, report=report)
    outcome = ScheduleResult([])
    for profile in profiles:
        _add(outcome, bench, profile, [result[profile.model] for result in results])
    return outcome


def _add(
    outcome: ScheduleResult,
    bench: ScheduleBench,
    profile: Profile,
    results: list[Json],
) -> None:
    """Adds the rows and traces of one profile; ``results`` are those of all ranks."""
    cluster = Cluster.parse(results[0]["cluster"])
    small = scaled_profile(profile, scale=bench.scale, slowdown=bench.slowdown)
    measured = {}
    simulated = {}
    rows = []
    for name, seconds in results[0]["rows"].items():
        plan = Plan.parse(seconds["plan"])
        simulated[name] = simulate(plan, small, cluster)
        measured[name] = Trace.from_json(seconds["trace"])
        rows.append(
            {
                "name": name,
                "model": profile.model,
                "num_hosts": bench.hosts,
                "ranks_per_host": bench.ranks_per_host,
                "link_bytes_per_s": bench.link_bytes_per_s,
                "scale": bench.scale,
                "slowdown": bench.slowdown,
                **_seconds([result["rows"][name] for result in results]),
                "simulated_s": simulated[name].iteration_s,
                "messages": len(plan.messages),
                "credit": plan.credit,
                "wire_bytes_per_step": mean(
                    figure
                    for result in results
                    for figure in result["rows"][name]["sent_bytes"]
                ),
                "settings": ", ".join(
                    f"{key}={value}" for key, value in plan.settings.items()
                ),
                "compute_s": small.forward_s + small.backward_s,
                "alpha_s": cluster.alpha_s,
                "beta_s_per_byte": cluster.beta_s_per_byte,
                "host_share": cluster.host_share,
                "busy_cores": sum(
                    result["rows"][name]["busy_cores"] for result in results
                ),
            }
        )
    outcome.rows.extend(_compared(rows))
    outcome.measured[profile.model] = measured
    outcome.simulated[profile.model] = simulated


def _seconds(ranks: Sequence[Json]) -> dict[str, float]:
    """The median iteration and its spread; the rank that ends last counts.

    An iteration begins where the one before it ended, on the last rank: so a rank that
    is late once and early afterwards lengthens one iteration and shortens the next.
    """
    iterations = zip(*(rank["iterations"] for rank in ranks), strict=True)
    seconds = [
        max(end_s for _, end_s in spans) - max(start_s for start_s, _ in spans)
        for spans in iterations
    ]
    return spread(seconds, "measured")


def _compared(rows: list[Row]) -> list[Row]:
    """The rows with what follows from two figures."""
    measured = {str(row["name"]): float(str(row["measured_s"])) for row in rows}
    for row in rows:
        own_s = measured[str(row["name"])]
        row["fraction_error"] = float(str(row["simulated_s"])) / own_s - 1
        for other in ("wfbp", "bytescheduler"):
            if other in measured:
                row[f"speedup_vs_{other}"] = measured[other] / own_s
    return rows


def draw(outcome: ScheduleResult, path: Path, *, title: str) -> None:
    """Writes one picture: for every row the measured timeline and, below it, the
    simulated one.
    """
    panels = {
        f"{model}, {name}, {kind}": traces[model][name]
        for model in outcome.measured
        for name in outcome.measured[model]
        for kind, traces in (
            ("measured", outcome.measured),
            ("simulated", outcome.simulated),
        )
    }
    timeline.draw(panels, path, title=title)
