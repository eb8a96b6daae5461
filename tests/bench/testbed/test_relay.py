"""All bytes of ranks pass through the relay, at the rate that it is given."""

from __future__ import annotations

from statistics import median

import pytest

from gradwire_bench.testbed.hosts import Testbed, relayed_hosts
from gradwire_bench.testbed.ranks import run_ranks
from gradwire_bench.testbed.relay import Links


def test_links_pass_bytes_at_their_rate_behind_a_burst() -> None:
    links = Links(1000.0, 0.5)
    assert links.due_s(0, 1, 500, 10.0) == 10.0  # what the pause has saved up
    assert links.due_s(0, 1, 1000, 10.0) == 11.0
    assert links.due_s(1, 0, 1500, 10.0) == 11.0  # the other way is free
    assert links.due_s(2, 1, 1000, 10.0) == 12.0  # the receiver's link is shared
    assert links.due_s(0, 3, 1000, 10.0) == 12.0  # and so is the sender's
    assert links.due_s(0, 1, 500, 99.0) == 99.0
    assert links.sent == {0: 3000, 1: 1500, 2: 1000}
    assert links.received == {0: 1500, 1: 3000, 3: 1000}


@pytest.mark.multi
def test_what_ranks_send_passes_through_and_takes_bytes_over_rate() -> None:
    rate_bytes_per_s, numel, num_hosts = 12.5e6, 500_000, 2
    testbed = Testbed(hosts=num_hosts, rate_bytes_per_s=rate_bytes_per_s)
    with relayed_hosts(testbed) as hosts:
        found = run_ranks(
            hosts,
            "tests.bench.testbed.relayed_rank",
            {"numel": numel},
            report=lambda fraction, what: None,
            timeout_s=100.0,
        )
    payload_bytes = 8 * numel * (num_hosts - 1) / num_hosts
    floor_s = payload_bytes / rate_bytes_per_s
    for rank in found:
        for seconds, sent_bytes in rank["turns"]:
            assert payload_bytes <= sent_bytes < 1.02 * payload_bytes
            assert seconds > 0.95 * floor_s
        assert rank["stated"] <= rank["counted"] < 1.1 * rank["stated"]
    assert median(seconds for seconds, _ in found[0]["turns"]) < 2 * floor_s
