"""`gradwire bench`: kernels beside torch's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gradwire.errors import GradwireError
from gradwire_bench.auto.auto import AutoBench
from gradwire_bench.runs.loopback import LoopbackBench
from gradwire_bench.schedule.schedule import ScheduleBench
from gradwire_bench.training.training import TrainBench
from tests.cli.conftest import Ended
from tests.each import each

Run = Callable[..., Ended]


def columns(ended: Ended) -> set[str]:
    assert ended.code == 0, ended.err
    return {key for row in json.loads(ended.out)["rows"] for key in row}


@pytest.mark.smoke
def test_commands_give_rows(gradwire: Run) -> None:
    words = (
        "kernel",
        "--only",
        "onebit",
        "--numel",
        "70000",
        "--rounds",
        "4",
        "--json",
    )
    assert {"kernel_s", "eager_s", "speedup_vs_eager"} <= columns(
        gradwire("bench", *words)
    )


REFUSED: dict[type[Any], dict[str, list[dict[str, Any]]]] = {
    AutoBench: {
        "model|hosts|fidelity": [
            {"models": ("vgg16",)},
            {"hosts": 1},
            {"fidelity": "best"},
        ],
    },
    TrainBench: {
        "to 2\\*\\*63 - 1, got": [{"ranks": 1}, {"steps": 9}],
        "learning_rates must be an odd number": [{"learning_rates": 2}],
        "no task is called .gtp.": [{"tasks": ("gtp",)}],
        "no optimizer is called .adam.": [{"optimizers": ("adam",)}],
    },
    ScheduleBench: {
        "hosts|turns|iterations": [{"hosts": 1}, {"turns": 0}, {"iterations": 0}],
        "ranks_per_host": [{"ranks_per_host": 0}],
        "slowdown|scale|profiles": [
            {"slowdown": 0.0},
            {"scale": float("nan")},
            {"profiles": ()},
        ],
        "planners|usbyte": [{"planners": ("wfbp", "wfbp")}, {"planners": ("none",)}],
    },
    LoopbackBench: {
        ".": [{"ranks": 1}, {"turns": 1}, {"compressors": ("nane",)}, {"task": "chess"}]
    },
}


@each("bench", REFUSED)
def test_settings_that_cannot_be_measured_are_refused(bench: type[Any]) -> None:
    for words, every in REFUSED[bench].items():
        for settings in every:
            with pytest.raises(GradwireError, match=words):
                bench(**settings)
