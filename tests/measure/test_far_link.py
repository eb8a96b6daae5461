"""TCP's settings in made-up trees of /proc, and what they cost on a far link."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.measure.far_link import FarLink, tcp_problems, tcp_settings
from tests.each import each

FAR = FarLink(rate_bytes_per_s=6.25e6, round_trip_s=0.08)
NEAR = FarLink(rate_bytes_per_s=125e6, round_trip_s=1e-4)
USUAL = {
    "tcp_congestion_control": "cubic",
    "tcp_slow_start_after_idle": "1",
    "tcp_rmem": "4096\t131072\t6291456",
    "tcp_wmem": "4096\t16384\t4194304",
}


def tree(folder: Path, files: dict[str, str]) -> dict[str, str | OSError]:
    """What is read where there are only these files."""
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return tcp_settings(folder)


def test_settings_are_read_and_absent_ones_have_their_error(tmp_path: Path) -> None:
    found = tree(tmp_path, {"tcp_rmem": "4096\t131072\t6291456"})
    assert found.pop("tcp_rmem") == "4096 131072 6291456"
    assert {type(error) for error in found.values()} == {FileNotFoundError}
    assert [*found] == [
        "tcp_congestion_control",
        "tcp_slow_start_after_idle",
        "tcp_wmem",
    ]


@each(
    "link, changed, remedies",
    [
        (FAR, {}, ["net.ipv4.tcp_slow_start_after_idle=0"]),
        (FAR, {"tcp_slow_start_after_idle": "0"}, []),
        (FAR, {"tcp_congestion_control": "bbr"}, []),
        (NEAR, {}, []),
        (
            FarLink(rate_bytes_per_s=62.5e6, round_trip_s=0.08),
            {"tcp_slow_start_after_idle": "0"},
            [
                "net.ipv4.tcp_rmem='4096 131072 10000000'",
                "net.ipv4.tcp_wmem='4096 16384 10000000'",
            ],
        ),
        (
            FAR,
            {"tcp_rmem": "1 2 999999"},
            [
                "net.ipv4.tcp_slow_start_after_idle=0",
                "net.ipv4.tcp_rmem='1 2 1000000'",
            ],
        ),
    ],
)
def test_each_setting_that_slows_a_link_has_its_line(
    link: FarLink,
    changed: dict[str, str],
    remedies: list[str],
    tmp_path: Path,
) -> None:
    found = tcp_problems(link, tree(tmp_path, USUAL | changed))
    assert [one.remedy for one in found] == [f"sysctl -w {line}" for line in remedies]


def test_what_cannot_be_read_is_no_problem(tmp_path: Path) -> None:
    assert tcp_problems(FAR, tcp_settings(tmp_path)) == []


def test_a_long_pause_costs_until_the_window_has_the_bytes_of_the_link() -> None:
    """In each round trip the link is empty once the window is sent."""
    segment_bytes = 1448
    link = FarLink(rate_bytes_per_s=1000.0 * segment_bytes, round_trip_s=0.035)
    # 35 segments fill it. Windows of 10 and 20 leave it empty for 25 and 15.
    assert link.bandwidth_delay_bytes == pytest.approx(35 * segment_bytes)
    assert link.idle_loss_s == pytest.approx(0.025 + 0.015)
    assert FarLink(rate_bytes_per_s=1e6, round_trip_s=0.01).idle_loss_s == 0
