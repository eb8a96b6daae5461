"""The price of gradwire where the network is free: training steps on loopback, beside
DDP's.

All sides train the same model in the same processes, in turn. Ranks share the machine's
cores, so what the machine does beside shows in ``step_s``. ``processor_s`` counts the
work of all threads of a rank, and is the figure to trust on a busy machine.
``switches`` counts how often they went to sleep, and so were woken up again. ``calls``
counts calls of Python's functions, which nothing else on the machine changes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from gradwire.cli.report.table import Row
from gradwire.contract.registry import names
from gradwire_bench.checks import check_counts, check_names
from gradwire_bench.figures import spread
from gradwire_bench.testbed.hosts import Testbed, loopback_hosts
from gradwire_bench.testbed.ranks import Json, Report, run_ranks
from gradwire_bench.training.tasks import make_task

from .loopback_rank import DDP, UNDER_DDP


@dataclass(frozen=True, kw_only=True)
class LoopbackBench:
    """The settings of a measurement: ``turns`` of ``iterations`` steps of each side."""

    ranks: int = 2
    task: str = "perceptron"
    turns: int = 8
    iterations: int = 10
    compressors: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        check_counts(self, ranks=2, turns=2, iterations=1)
        check_names("compressor", self.compressors, names("compress"))
        make_task(self.task)

    @property
    def rows(self) -> list[str]:
        """The sides, in turn: DDP, each compressor by ``attach``, and each under
        DDP.
        """
        return [
            DDP,
            *self.compressors,
            *(UNDER_DDP + name for name in self.compressors),
        ]


def run(bench: LoopbackBench, report: Report) -> list[Row]:
    """A row a side; a step's time is its slowest rank's.

    ``speedup_vs_ddp`` is the median over turns of DDP's median step over that of the
    same turn.
    """
    settings = {**asdict(bench), "rows": bench.rows}
    with loopback_hosts(Testbed(hosts=bench.ranks)) as hosts:
        results = run_ranks(hosts, f"{__name__}_rank", settings, report=report)
    base = [median(turn) for turn in _turns_s([result[DDP] for result in results])]
    return [
        _row(bench, name, base, [result[name] for result in results])
        for name in bench.rows
    ]


def _turns_s(ranks: Sequence[Json]) -> list[list[float]]:
    """The seconds of each turn's steps on the slowest rank."""
    turns = zip(*(rank["seconds"] for rank in ranks), strict=True)
    return [[max(step) for step in zip(*turn, strict=True)] for turn in turns]


def _row(
    bench: LoopbackBench,
    name: str,
    base: Sequence[float],
    ranks: Sequence[Json],
) -> Row:
    turns = _turns_s(ranks)
    speedups = [step_s / median(turn) for step_s, turn in zip(base, turns, strict=True)]

    def in_a_step(part: str) -> float:
        figures: list[float] = [turn for rank in ranks for turn in rank[part]]
        return median(figures)

    return {
        "name": name,
        "num_hosts": bench.ranks,
        **spread([step for turn in turns for step in turn]),
        "speedup_vs_ddp": median(speedups),
        "processor_s": in_a_step("processor_s"),
        "switches": in_a_step("switches"),
        "calls": in_a_step("calls"),
    }
