"""``gradwire doctor``: true statements about this machine, and a remedy with every
warning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradwire.cli.commands import doctor as diagnosis
from gradwire.cli.commands.doctor import fit_rows, link_warnings
from gradwire.cli.report.table import Row
from gradwire.measure import far_link
from gradwire.measure.links import LinkReport
from gradwire.planning.data.fit import LineFit
from tests.cli.conftest import Ended
from tests.each import each

Run = Callable[..., Ended]
HOST: list[Row] = [{"name": "eth0"}, {"name": "lo"}]


def test_markdown_has_every_section(gradwire: Run) -> None:
    ended = gradwire("doctor")
    assert ended.code == 0
    sections = [line[3:] for line in ended.out.splitlines() if line.startswith("## ")]
    assert sections == [
        "Machine",
        "Back ends",
        "Interfaces",
        "Kernels",
        "GPU",
        "Environment",
        "TCP",
        "Warnings",
    ]
    assert f"| torch | {torch.__version__} |" in ended.out


def test_absent_figures_are_named_and_empty_columns_left_out(
    gradwire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row says what is absent, and a column without any figure is left out."""
    monkeypatch.setattr(diagnosis, "installed_version", lambda name: None)
    monkeypatch.setattr("gradwire.kernels.compiler.find_compiler", lambda: None)
    monkeypatch.setattr(
        diagnosis,
        "interfaces",
        lambda: [{"name": "eth0", "mtu": None, "addresses": ["10.0.0.5"]}],
    )
    out = gradwire("doctor").out
    assert "| - " not in out
    assert "| triton | not installed |" in out
    assert "| none found |" in out
    assert "mtu" not in out


def test_json_has_the_same_sections(gradwire: Run) -> None:
    result = json.loads(gradwire("doctor", "--json").out)
    assert result["command"] == "doctor"
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["gloo"]["available"] == torch.distributed.is_gloo_available()
    assert rows["shared memory"]["available"] == hasattr(os, "memfd_create")
    assert "127.0.0.1" in rows["lo"]["addresses"]
    assert rows["CPU kernels"]["backend"] in ("cpp", "reference")


def test_memory_that_cannot_be_shared_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("os.memfd_create")
    row = diagnosis.backends()[-1]
    assert (row["name"], row["available"]) == ("shared memory", False)
    assert "memfd_create" in str(row["reason"])


def test_interfaces_come_from_the_system(tmp_path: Path) -> None:
    for name, state, speed in (("slow9", "up", "1000"), ("dark9", "down", "-1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
        (tmp_path / name / "speed").write_text(f"{speed}\n")
        (tmp_path / name / "mtu").write_text("1500\n")
    (row,) = diagnosis.interfaces(["slow9", "dark9"], tmp_path)
    assert row == {
        "name": "slow9",
        "mtu": 1500,
        "speed_bytes_per_s": 125e6,
        "addresses": [],
    }


@each(
    "variables, address, named",
    [
        ({}, "10.0.0.5", []),
        ({}, "127.0.1.1", ["host name"]),
        ({}, None, ["host name"]),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "127.0.1.1", []),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "10.0.0.5", ["GLOO_SOCKET_IFNAME"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "10.0.0.5", []),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "10.0.0.5", ["NCCL_SOCKET_IFNAME"]),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "10.0.0.5", []),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "localhost"},
            "10.0.0.5",
            ["MASTER_ADDR"],
        ),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"},
            "10.0.0.5",
            [],
        ),
    ],
)
def test_each_wrong_network_setting_is_named_with_its_remedy(
    variables: dict[str, str], address: str | None, named: list[str]
) -> None:
    found = diagnosis.network_warnings(HOST, variables, address)
    assert [row["name"] for row in found] == named
    assert all(row["remedy"] for row in found)


def test_the_seconds_for_a_name_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a name that there is not."""
    now_s, asked = 0.0, []

    def ask(address: tuple[str, int], flags: int) -> None:
        nonlocal now_s
        asked.append(address[0])
        now_s += 5.0
        raise OSError("no name")

    monkeypatch.setattr(diagnosis.socket, "getnameinfo", ask)
    monkeypatch.setattr(diagnosis.time, "perf_counter", lambda: now_s)
    assert diagnosis.naming_s("10.0.0.2") == 5.0
    assert asked == ["10.0.0.2"]


@each(
    "variables, num_cores, remedy",
    [
        ({}, 2, None),
        ({"LOCAL_WORLD_SIZE": "4"}, 8, "set OMP_NUM_THREADS=2 for every rank"),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "2"}, 8, None),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, 2, "set OMP_NUM_THREADS=1"),
    ],
)
def test_wrong_thread_counts_are_named_with_their_remedy(
    variables: dict[str, str], num_cores: int, remedy: str | None
) -> None:
    found = diagnosis.thread_warnings(variables, num_cores)
    assert bool(found) == (remedy is not None)
    assert all(str(row["remedy"]).startswith(str(remedy)) for row in found)


def test_missing_parts_are_named() -> None:
    built: list[Row] = [{"name": "CPU kernels", "backend": "reference"}]
    backends: list[Row] = [{"name": "nccl", "available": False}]
    found = diagnosis.part_warnings(built, [{"name": "cuda:0"}], backends)
    assert [row["name"] for row in found] == ["CPU kernels", "nccl"]
    cpp: list[Row] = [{"name": "CPU kernels", "backend": "cpp"}]
    assert diagnosis.part_warnings(cpp, [], backends) == []


@each(
    "fit, reliable",
    [
        (LineFit(alpha_s=1e-4, per_unit_s=1e-8, residual=0.05), True),
        (LineFit(alpha_s=1e-4, per_unit_s=1e-8, residual=0.5), False),
        (LineFit(alpha_s=0.0, per_unit_s=1e-8, residual=0.05), False),
        (LineFit(alpha_s=1e-4, per_unit_s=0.0, residual=0.05), False),
    ],
)
def test_a_bad_fit_is_called_bad(fit: LineFit, reliable: bool) -> None:
    report = LinkReport(world=4, backend="gloo", fit=fit)
    assert (link_warnings(report) == []) == reliable
    assert fit_rows(report)[0]["alpha_s"] == fit.alpha_s


FIT = LineFit(alpha_s=1e-4, per_unit_s=2.4e-7, residual=0.05)
FLAT = LineFit(alpha_s=1e-4, per_unit_s=0.0, residual=0.05)


def far_report(fit: LineFit = FIT, round_trip_s: float | None = 0.08) -> LinkReport:
    """Four ranks on links of 50 Mbit/s."""
    return LinkReport(4, "gloo", fit, round_trip_s)


@each(
    "rate, rtt_ms, report, found",
    [
        (None, None, None, None),
        ("500mbit", 80.0, None, (62.5e6, 0.08)),
        (None, None, far_report(), (6.25e6, 0.08)),
        ("500mbit", 20.0, far_report(), (62.5e6, 0.02)),
        (None, None, far_report(round_trip_s=None), None),
        (None, None, far_report(FLAT), None),
    ],
)
def test_a_link_is_as_given_else_as_measured(
    rate: str | None,
    rtt_ms: float | None,
    report: LinkReport | None,
    found: tuple[float, float] | None,
) -> None:
    link = diagnosis.far_link(rate, rtt_ms, report)
    figures = None if link is None else (link.rate_bytes_per_s, link.round_trip_s)
    assert figures == (None if found is None else pytest.approx(found))


@each(
    "words, said",
    [
        (("--rate", "50mbit"), "--rate and --rtt together"),
        (("--rtt", "80"), "--rate and --rtt together"),
        (("--rtt", "-1", "--rate", "50mbit"), "0 to 10000 milliseconds"),
        (("--rate", "fast", "--rtt", "80"), "write 500mbit"),
    ],
)
def test_half_a_link_is_refused(
    gradwire: Run, words: tuple[str, ...], said: str
) -> None:
    ended = gradwire("doctor", *words)
    assert ended.code == 2
    assert said in ended.err.replace("\n", " ")


def test_a_far_link_has_rows_and_warnings(
    gradwire: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read has a reason, and what is slow the line that mends it."""
    (tmp_path / "tcp_congestion_control").write_text("cubic\n")
    (tmp_path / "tcp_slow_start_after_idle").write_text("1\n")
    monkeypatch.setattr(
        diagnosis, "tcp_settings", lambda: far_link.tcp_settings(tmp_path)
    )
    words = ("--rate", "50mbit", "--rtt", "80", "--json")
    rows = {
        row["name"]: row for row in json.loads(gradwire("doctor", *words).out)["rows"]
    }
    assert rows["tcp_congestion_control"]["value"] == "cubic"
    assert rows["tcp_rmem"]["value"] is None
    assert rows["tcp_rmem"]["reason"] == "cannot be read: No such file or directory"
    assert rows["one connection"]["bandwidth_delay_bytes"] == 500e3
    warned = rows["tcp_slow_start_after_idle"]
    assert warned["section"] == "Warnings"
    assert warned["remedy"] == "sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
    out = gradwire("doctor", *words[:-1]).out
    assert "cannot be read: No such file or directory" in out
    assert "## Far link" in out
