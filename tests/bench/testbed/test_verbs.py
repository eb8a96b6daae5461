"""Gloo sends what is counted for each verb: by the counters of the hosts' own
interfaces.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradwire_bench.testbed.hosts import Testbed, shaped_hosts
from gradwire_bench.testbed.launch import launch

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("one_verb.py"))
NUMEL, NUM_HOSTS = 6 * 50_000, 3
HEADERS, OTHERS_BYTES = 0.03, 40_000
"""Of payload, and what acknowledgements and barriers add."""


@pytest.mark.netns
def test_the_bytes_counted_are_those_that_are_sent() -> None:
    with shaped_hosts(Testbed(hosts=NUM_HOSTS, rate_bytes_per_s=6.25e7)) as hosts:
        command = [sys.executable, PROGRAM, str(NUMEL)]
        exits = launch(hosts, command, output="none", timeout_s=120, check=True)
    for rank, end in enumerate(exits):
        for verb, (sent, counted) in json.loads(end.last_lines[-1]).items():
            allowed = pytest.approx(counted, rel=HEADERS, abs=OTHERS_BYTES)
            assert sent == allowed, f"{verb} on rank {rank} of {NUM_HOSTS}"
