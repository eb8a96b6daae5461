"""``bench device`` on a CPU: every part gives its rows, and says what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradwire.compress.onebit import onebit
from gradwire_bench.micro import device, offload
from tests.bench.testbed.forked import fork_ranks
from tests.runtime import late
from tests.runtime.ranks import Ranks


def ignore(done: float, what: str) -> None:
    pass


@pytest.fixture
def late_one() -> Iterator[Ranks]:
    """A process of its own, as the device stays in it."""
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.mark.smoke
def test_kernels_and_the_partition_have_their_rows() -> None:
    bench = device.DeviceBench.small(parts=("kernels", "partition"), numel=4096, zen_numel=10_000)
    rows, notes = device.run(bench, ignore, codecs=[onebit()])
    named: dict[str, Any] = {str(row["name"]): row for row in rows}
    assert {"copy", "onebit/decode-plain", "partition/cpu"} < {*named}
    assert named["onebit/encode"]["fraction_of_copy_bandwidth"] > 0
    assert named["onebit/encode"]["eager_s"] > 0
    assert named["partition/cpu"]["num_entries"] == 520
    assert notes == [f"device: cpu, torch {torch.__version__}"]


def offloaded(rank: int, world: int) -> list[dict[str, Any]]:
    """The rows of a device that is none, whose products and selections are small."""
    noted = late.install()
    where = torch.device("late:0")
    rows = offload.rows(where, (4_000, 10_000), 2, width=32, loop_s=0.005)
    assert noted.wrong == []
    return rows


@pytest.mark.multi
def test_a_device_has_both_ways_and_what_they_cost(late_one: Ranks) -> None:
    ((small, large),) = late_one.run(offloaded)
    assert (small["name"], large["name"]) == ("offload/4 KB", "offload/10 KB")
    for row in (small, large):
        assert min(row[key] for key in ("on_host_s", "on_device_s", "loop_s")) > 0
        assert {"loop_per_selection_on_host_s", "loop_per_selection_on_device_s"} < {*row}
    assert "paper_host_s" not in small
    assert large["paper_host_s"] == 1.49e-3


@pytest.mark.multi
@pytest.mark.slow
def test_each_way_to_average_trains_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch, device, _VOCABULARY=64, _CONTEXT=16, _BATCH=1)
    bench = device.DeviceBench.small(parts=("training",), width=64, num_layers=1, steps=1)
    rows, _ = device.run(bench, ignore)
    assert [str(row["name"]) for row in rows] == [f"training/{side}" for side in device.SIDES]
    assert all(float(str(row["steps_per_second"])) > 0 for row in rows)
    assert len({row["num_parameters"] for row in rows}) == 1
