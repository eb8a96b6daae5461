"""`gradwire testbed`: exit codes, one JSON object, figures per host."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ended

Run = Callable[..., Ended]
TRANSFER = str(Path(__file__).with_name("transfer.py"))


@pytest.mark.netns
def test_json_is_one_object_with_a_row_per_host(gradwire: Run) -> None:
    words = ("run", "--hosts", "2", "--json", sys.executable, TRANSFER, "100000")
    done = gradwire("testbed", *words)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert set(result) == {"command", "version", "machine", "rows"}
    receiver, sender = result["rows"]
    assert (receiver["name"], sender["name"]) == ("host0", "host1")
    assert 100_000 < receiver["rx_bytes"] <= sender["tx_bytes"] < 150_000
    assert "counted eth0" in done.err  # rank 0's stdout, out of the object's way


@pytest.mark.netns
def test_the_code_of_the_rank_that_failed_is_returned(gradwire: Run) -> None:
    script = "[ $RANK != 1 ] || { echo broken; exit 7; }; exec sleep 60"
    words = ("run", "--hosts", "2", "--grace", "0.1", "--", "sh", "-c", script)
    done = gradwire("testbed", *words)
    assert done.code == 7
    assert "rank 1 failed first, with exit code 7" in done.err
    assert "broken" in done.err
    assert "host1" in done.out


@pytest.mark.netns
def test_far_links_are_named_and_the_forwarder_speaks_on_stderr(gradwire: Run) -> None:
    far = ("--delay", "2", "--jitter", "1", "--slow", "1=10mbit")
    words = ("run", "--hosts", "2", *far, sys.executable, TRANSFER, "100000")
    done = gradwire("testbed", *words)
    assert done.code == 0, done.err
    assert "500mbit links, 2 to 3 ms one way, host1 at 10.0 Mbit/s" in done.out
    assert "forwarder: " in done.err
    assert "of processor time" in done.err


def test_links_that_cannot_be_are_refused(gradwire: Run) -> None:
    for words, said in (
        (
            ("testbed", "run", "--delay", "-1", "true"),
            "delay_s must be 0 to 10 seconds",
        ),
        (("testbed", "run", "--slow", "1", "true"), "write 1=10mbit"),
        (("testbed", "run", "--slow", "9=1mbit", "true"), "one of the 4 hosts"),
        (("bench", "auto", "--rate", "loopback", "--delay", "3"), "loopback cannot"),
        (("bench", "train", "--delay", "3"), "write --rate 100mbit"),
        (("bench", "faults", "--slow", "9=1mbit"), "one of the 6 hosts"),
        (("profile", "vgg16", "--jitter", "-1"), "jitter_s must be 0 to 10 seconds"),
    ):
        done = gradwire(*words)
        assert done.code == 2, words
        assert said in done.err.replace("\n", " ")


def test_a_users_mistake_is_code_2(gradwire: Run) -> None:
    done = gradwire("testbed", "run", "--rate", "fast", "true")
    assert done.code == 2
    assert "write 500mbit" in done.err
