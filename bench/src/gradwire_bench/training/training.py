"""Training costs of compressors' errors: small models, by each method, for the same
steps.

All replicas train in one process, so losses and bytes are real and seconds are not
measured. Learning rates go up and then down by half a cosine. Messages are those that
``attach`` makes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from statistics import mean

from gradwire.cli.report.table import Row
from gradwire.contract.registry import names
from gradwire.errors import invalid

from ..checks import check_counts, check_names
from ..testbed.ranks import Report, part_of
from ..workloads.train import History, train
from .methods import DENSE, method
from .tasks import OPTIMIZERS, TASKS, make_task


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Settings of ``bench train``: ``trained`` are names of methods; by default all
    compressors.

    A method's learning rate is the best of ``learning_rates`` powers of two around the
    task's own, by the held-out loss of the first seed. Every other seed is trained at
    that rate alone.
    """

    tasks: tuple[str, ...] = ("gpt",)
    optimizers: tuple[str, ...] = ("adamw",)
    ranks: int = 4
    steps: int = 400
    seeds: int = 1
    learning_rates: int = 1
    trained: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_counts(self, ranks=2, steps=10, seeds=1, learning_rates=1)
        if not self.learning_rates % 2:
            raise invalid(
                "learning_rates", self.learning_rates, "an odd number", "write 3"
            )
        check_names("task", self.tasks, TASKS)
        check_names("optimizer", self.optimizers, OPTIMIZERS)

    @property
    def title(self) -> str:
        """The tasks and settings in words."""
        tasks = "; ".join(make_task(name).description for name in self.tasks)
        ways = (
            f"{self.ranks} ranks, {self.steps} steps of {' and '.join(self.optimizers)}"
        )
        return f"{tasks}; {ways}; means of {self.seeds} seeds"

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of all methods, uncompressed training first."""
        return (DENSE, *(self.trained or names("compress")))

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors of the task's own learning rate that are tried, that rate first.

        >>> TrainBench(learning_rates=5).factors
        (1.0, 0.5, 2.0, 0.25, 4.0)
        """
        pairs = [
            (2.0**-power, 2.0**power)
            for power in range(1, self.learning_rates // 2 + 1)
        ]
        return (1.0, *(factor for pair in pairs for factor in pair))


@dataclass(frozen=True)
class _Tuned:
    """One method's trainings on one task: the chosen factor, and a history a seed."""

    factor: float
    histories: tuple[History, ...]

    @property
    def losses(self) -> list[float]:
        return [history.scores[-1][1] for history in self.histories]

    @property
    def sent_bytes(self) -> float:
        return mean(mean(history.sent_bytes) for history in self.histories)


def run(bench: TrainBench, report: Report = lambda fraction, what: None) -> list[Row]:
    """One row a method, task and optimizer; uncompressed training first of each
    task's.
    """
    for name in bench.methods:
        method(name)
    kinds = [
        (task, optimizer) for task in bench.tasks for optimizer in bench.optimizers
    ]
    total = len(kinds) * len(bench.methods) * (len(bench.factors) + bench.seeds - 1)
    done = iter(range(total))
    rows: list[Row] = []
    for task, optimizer in kinds:
        dense: _Tuned | None = None
        for name in bench.methods:
            what = f"{name}, {task}, {optimizer}"
            tuned = _tuned(
                bench, task, optimizer, name, _shares(report, done, total, what)
            )
            dense = dense or tuned
            rows.append(
                {"task": task, "optimizer": optimizer, **_row(name, tuned, dense)}
            )
    return rows


def _shares(
    report: Report, done: Iterator[int], total: int, what: str
) -> Iterator[Report]:
    """A report for each of the trainings that come next."""
    for number in done:
        yield part_of(report, number, total, f"{what}: ")


def _tuned(
    bench: TrainBench, task: str, optimizer: str, name: str, reports: Iterator[Report]
) -> _Tuned:
    """The method at its best rate on the first seed, and on the other seeds at that
    rate.
    """

    def trained(factor: float, seed: int) -> History:
        made = make_task(task, optimizer, times_rate=factor, seed=seed)
        recipe = method(name)(made, bench.steps)
        return train(
            recipe.task,
            recipe.exchange,
            world=bench.ranks,
            num_steps=bench.steps,
            num_warm_up=bench.steps // 10,
            as_attached=True,
            report=next(reports),
        )

    tried = {factor: trained(factor, 0) for factor in bench.factors}
    ends = {factor: trained.scores[-1][1] for factor, trained in tried.items()}
    # NaN is not less
    best = min(ends, key=lambda factor: (isnan(ends[factor]), ends[factor]))
    others = [trained(best, seed) for seed in range(1, bench.seeds)]
    return _Tuned(best, (tried[best], *others))


def _row(name: str, tuned: _Tuned, dense: _Tuned) -> Row:
    losses = tuned.losses
    return {
        "name": name,
        "loss": mean(losses),
        "loss_low": min(losses),
        "loss_high": max(losses),
        "loss_over_dense": mean(losses) / mean(dense.losses),
        "times_rate": tuned.factor,
        "sent_bytes_per_step": tuned.sent_bytes,
        "sent_over_dense": tuned.sent_bytes / dense.sent_bytes,
    }


def hidden(bench: TrainBench) -> set[str]:
    """Keys that say nothing beside the title: what is the same in all rows."""
    alike = {
        "task": len(bench.tasks) == 1,
        "optimizer": len(bench.optimizers) == 1,
        "loss_low": bench.seeds == 1,
        "loss_high": bench.seeds == 1,
        "times_rate": bench.learning_rates == 1,
    }
    return {key for key, is_constant in alike.items() if is_constant}
