"""`gradwire testbed`: exit codes, one JSON object, figures per host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("gradwire_command.py"))
TRANSFER = str(Path(__file__).with_name("transfer.py"))


def gradwire(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, "testbed", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.netns
def test_json_is_one_object_with_a_row_per_host() -> None:
    done = gradwire("run", "--hosts", "2", "--json", sys.executable, TRANSFER, "100000")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"command", "version", "machine", "rows"}
    receiver, sender = result["rows"]
    assert (receiver["name"], sender["name"]) == ("host0", "host1")
    assert 100_000 < receiver["rx_bytes"] <= sender["tx_bytes"] < 150_000
    assert "counted eth0" in done.stderr  # rank 0's stdout, out of the object's way


@pytest.mark.netns
def test_the_code_of_the_rank_that_failed_is_returned() -> None:
    script = "[ $RANK != 1 ] || { echo broken; exit 7; }; exec sleep 60"
    done = gradwire("run", "--hosts", "2", "--grace", "0.1", "--", "sh", "-c", script)
    assert done.returncode == 7
    assert "rank 1 failed first, with exit code 7" in done.stderr
    assert "broken" in done.stderr
    assert "host1" in done.stdout


def test_a_users_mistake_is_code_2() -> None:
    done = gradwire("run", "--rate", "fast", "true")
    assert done.returncode == 2
    assert "write 500mbit" in done.stderr
