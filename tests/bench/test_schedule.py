"""``bench schedule``: which rows there are, what is worked out, and one run on two real
links.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradwire.contract.units import parse_rate
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire_bench.schedule import schedule
from gradwire_bench.schedule.replay import scaled_profile
from gradwire_bench.schedule.schedule import ScheduleBench
from tests.bench.testbed.forked import run_instead

pytestmark = pytest.mark.slow

PROFILE = Profile(
    model="made up",
    source="made up",
    batch_size=1,
    layers=tuple(
        Layer(
            name=f"layer{i}",
            tensors=(ProfiledTensor(name=f"layer{i}.weight", shape=(numel,)),),
            forward_s=0.002,
            backward_s=0.004,
        )
        for i, numel in enumerate((64_000, 6_400, 256_000, 640))
    ),
)


@pytest.mark.smoke
def test_rows_are_planners_of_which_some_are_tuned() -> None:
    rows = {row["name"]: row for row in ScheduleBench().rows()}
    assert list(rows) == [
        "wfbp",
        "ddp",
        "mgwfbp",
        "bytescheduler",
        "usbyte",
        "usbyte_extended",
    ]
    tuned = ["bytescheduler", "usbyte", "usbyte_extended"]
    assert [name for name, row in rows.items() if row["tune"]] == tuned


def test_the_rank_that_ends_last_counts() -> None:
    """Rank 1 is 0.5 late in the second iteration and as early as the other in the
    third.
    """
    ranks = [
        {"iterations": [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]},
        {"iterations": [(0.0, 1.0), (1.0, 2.5), (2.5, 3.0)]},
    ]
    found = schedule._seconds(ranks)
    assert found["measured_s"] == 1.0
    assert found["measured_p20_s"] == pytest.approx(0.7)
    assert found["measured_p80_s"] == pytest.approx(1.3)
    assert schedule._seconds([{"iterations": [(0.0, 2.0)]}])["measured_p80_s"] == 2.0


@pytest.mark.netns
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "ranks_per_host", [pytest.param(1, marks=pytest.mark.nightly), 2]
)
def test_a_profile_is_replayed_on_shaped_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks_per_host: int
) -> None:
    run_instead(monkeypatch, schedule, "tests.bench.brief_schedule_rank")
    PROFILE.save(tmp_path / "profile.json")
    bench = ScheduleBench(
        profiles=(str(tmp_path / "profile.json"),),
        hosts=2,
        ranks_per_host=ranks_per_host,
        rate_bytes_per_s=parse_rate("1gbit"),
        scale=2,
        slowdown=5,
        turns=1,
        iterations=2,
        planners=("wfbp", "usbyte"),
        trials=2,
    )
    outcome = schedule.run(bench, lambda fraction, what: None)
    rows: dict[str, dict[str, Any]] = {str(row["name"]): row for row in outcome.rows}
    assert list(rows) == ["wfbp", "usbyte"]
    payload_bytes = scaled_profile(
        PROFILE, scale=2
    ).size_bytes  # a ring of two sends each byte once
    for row in rows.values():
        assert row["measured_s"] >= row["compute_s"] * 0.999
        assert row["simulated_s"] >= row["compute_s"]
        assert payload_bytes < row["wire_bytes_per_step"] < 1.2 * payload_bytes + 50_000
    assert rows["wfbp"]["messages"] == 4
    measured = outcome.measured["made up"]["wfbp"]
    assert {lane for _, lane in measured.lanes()} >= {
        "forward",
        "backward",
        "communication",
    }
    assert len(measured.only(lambda span: span.lane == "backward").spans) == 4
