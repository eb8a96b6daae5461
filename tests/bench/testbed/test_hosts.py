"""Links limit, counters count, testbeds stay apart, and loopback stands in where they
cannot be.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import InvalidSetting
from gradwire_bench.errors import TestbedUnavailable
from gradwire_bench.testbed import hosts as hosts_module
from gradwire_bench.testbed import netns
from gradwire_bench.testbed.counters import InterfaceCounters
from gradwire_bench.testbed.hosts import (
    HostLinks,
    Hosts,
    Testbed,
    available,
    open_hosts,
    shaped_hosts,
)
from gradwire_bench.testbed.launch import launch
from gradwire_bench.testbed.netns import find_tool

TRANSFER = str(Path(__file__).with_name("transfer.py"))
RATE = 12_500_000.0  # 100 Mbit
PAYLOAD_SHARE = 1448 / 1514


def transfer(
    hosts: Hosts, size_bytes: int
) -> tuple[float, list[str], list[InterfaceCounters]]:
    """Seconds, the receiver's other words, and what every host's counters gained."""
    before = hosts.read_counters()
    command = [sys.executable, TRANSFER, str(size_bytes)]
    exits = launch(hosts, command, output="none", timeout_s=100, check=True)
    added = [
        now.since(then) for now, then in zip(hosts.read_counters(), before, strict=True)
    ]
    _, seconds, *words = " ".join(exits[0].last_lines).split()
    return float(seconds), words, added


def shapers(hosts: Hosts) -> dict[str, dict[str, Any]]:
    """What the kernel says of each shaper that bytes to host 0 pass, by its
    interface.
    """
    spaces = hosts.namespaces
    assert spaces is not None
    found = {}
    for host, pid in enumerate((spaces.holder_pid, *spaces.pids[1:])):
        command = [*spaces.enter(pid), find_tool("tc"), "-s", "-j", "qdisc", "show"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        wanted = netns.INTERFACE if host else "port0"
        for one in json.loads(done.stdout):
            if one.get("dev") == wanted:
                found[f"{wanted} of {host}"] = one
    assert len(found) == len(spaces.pids)
    return found


@pytest.mark.smoke
@pytest.mark.netns
@pytest.mark.parametrize("num_senders", [1, 3])
def test_the_rate_limits_and_is_reached_and_the_counters_count(
    num_senders: int,
) -> None:
    """Also a rate that links were changed to.

    A machine that has no time for the senders is slower than the rate. So not seconds
    tell that it is reached, but packets that a shaper of this rate has held back.
    """
    size_bytes = 6_000_000 // num_senders
    expected_s = 6_000_000 / (RATE * PAYLOAD_SHARE)
    settings = Testbed(hosts=num_senders + 1, rate_bytes_per_s=RATE)
    first_rate = RATE if num_senders == 1 else 10 * RATE
    with shaped_hosts(replace(settings, rate_bytes_per_s=first_rate)) as hosts:
        if first_rate != RATE:
            HostLinks(hosts, settings).mend()
        took_s, words, added = transfer(hosts, size_bytes)
        of_all = hosts.read_counters()[0]
        shaped = shapers(hosts)
    assert took_s > 0.85 * expected_s
    for name, shaper in shaped.items():
        assert (shaper["kind"], shaper["options"]["rate"]) == ("tbf", RATE)
        # The bridge's shaper gets one sender's bytes at the rate already.
        assert shaper["overlimits"] > 0 or (name, num_senders) == ("port0 of 0", 1)
    # Lost packets are sent again, so senders may count more than arrives.
    assert 6_000_000 < added[0].rx_bytes < 1.5 * 6_000_000
    for sender in added[1:]:
        assert size_bytes < sender.tx_bytes < 2 * size_bytes
        assert 0 < sender.rx_bytes < 0.2 * size_bytes
    name, own_tx_bytes, own_rx_bytes = words[1:]
    assert name == "eth0"
    assert 0 < int(own_tx_bytes) <= of_all.tx_bytes
    assert 6_000_000 < int(own_rx_bytes) <= of_all.rx_bytes


@pytest.mark.netns
def test_ranks_of_one_host_do_not_use_its_link() -> None:
    """Rank 0 receives from three ranks, of which one is on its own host."""
    settings = Testbed(hosts=2, ranks_per_host=2, rate_bytes_per_s=RATE)
    with shaped_hosts(settings) as hosts:
        _, _, (receiver, sender) = transfer(hosts, 400_000)
    assert 800_000 < receiver.rx_bytes <= sender.tx_bytes < 1_000_000
    with pytest.raises(
        InvalidSetting, match="ranks_per_host must be a whole number, 1 to 64"
    ):
        Testbed(ranks_per_host=0)


@pytest.mark.netns
def test_two_testbeds_do_not_see_each_other() -> None:
    listen = (
        "import socket; s = socket.create_server(('', 5000)); print(flush=True); "
        "s.accept()"
    )
    probe = (
        "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=60)"
    )
    with shaped_hosts(Testbed(hosts=2)) as one, shaped_hosts(Testbed(hosts=2)) as other:
        command = one.command_on(0, [sys.executable, "-c", listen])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            server.stdout.readline()
            outcomes = {}
            for name, hosts in (("other", other), ("one", one)):
                reach = hosts.command_on(
                    1, [sys.executable, "-c", probe, hosts.addresses[0]]
                )
                done = subprocess.run(
                    reach, capture_output=True, text=True, check=False
                )
                outcomes[name] = (done.returncode, "ConnectionRefused" in done.stderr)
    assert outcomes == {"other": (1, True), "one": (0, False)}


@pytest.mark.netns
@pytest.mark.parametrize("rate_bytes_per_s", [12_500.0, 12.5e9])
def test_the_extreme_rates_can_be_made(rate_bytes_per_s: float) -> None:
    with shaped_hosts(
        Testbed(hosts=1, rate_bytes_per_s=rate_bytes_per_s, mtu=9000)
    ) as hosts:
        assert hosts.shaped


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, package in (
        ("ip", "iproute2"),
        ("tc", "iproute2"),
        ("nsenter", "util-linux"),
    ):
        there = {
            name: f"/{name}" for name in ("ip", "tc", "nsenter") if name != missing
        }
        monkeypatch.setattr(
            netns.shutil, "which", lambda name, path=None, of=there: of.get(name)
        )
        found = available()
        assert found.kind == "none"
        assert f"{missing!r} is not installed (package {package}" in found.reason


def test_loopback_stands_in_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise TestbedUnavailable("the kernel has no tbf shaper")

    monkeypatch.setattr(hosts_module, "open_namespaces", refuse)
    hosts_module._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="gradwire"):
        for _ in range(2):
            with open_hosts(Testbed(hosts=2)) as hosts:
                assert not hosts.shaped
                assert len(hosts) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "no shaped links, running on plain loopback at full speed: the kernel "
        "has no tbf shaper"
    ]
