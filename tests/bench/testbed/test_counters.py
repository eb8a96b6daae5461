"""Counters are read from the right columns of the right interface."""

from __future__ import annotations

from gradwire_bench.testbed.counters import parse_counters

LISTING = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo:     120       2    0    0    0     0          0         0      120       2    0
  eth0: 4567890     321    0    0    0     0          0         0   123456      99    0
 eth01:1 2 3 4 5 6 7 8 9 10 11 12
"""


def test_counters_are_read_from_the_row_of_the_named_interface() -> None:
    found = parse_counters(LISTING, "eth0")
    assert (found.tx_bytes, found.rx_bytes, found.shared) == (123456, 4567890, False)
    crowded = parse_counters(LISTING, "eth01")
    assert (crowded.tx_bytes, crowded.rx_bytes) == (9, 1)
    assert parse_counters(LISTING, "eth") is None
