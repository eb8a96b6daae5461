"""A model on hosts of several ranks, from torchrun's variables to the bytes on each host's link."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradwire_bench.testbed.hosts import Testbed, shaped_hosts
from gradwire_bench.testbed.launch import launch

PROGRAM = str(Path(__file__).with_name("on_hosts.py"))
NUMEL = 1_000_000
HEADERS, OTHERS_BYTES = 0.03, 80_000
"""Of payload, and what acknowledgements, presence, barriers and the pulse add."""


@pytest.mark.slow
@pytest.mark.netns
def test_every_element_crosses_a_hosts_link_once() -> None:
    """Two hosts of two ranks: around a ring of all four, links would carry half as much again."""
    settings = Testbed(hosts=2, ranks_per_host=2, rate_bytes_per_s=6.25e7)
    with shaped_hosts(settings) as hosts:
        command = [sys.executable, PROGRAM, str(NUMEL)]
        exits = launch(hosts, command, output="none", timeout_s=100, check=True)
    for rank in (0, 2):  # one of each host
        sent = json.loads(exits[rank].last_lines[-1])
        assert sent == pytest.approx(4 * NUMEL, rel=HEADERS, abs=OTHERS_BYTES)
