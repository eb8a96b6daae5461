"""``bench exchange``: which exchanges there are, what rows say, and bytes of a run for
real.
"""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.contract.registry import load, names
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.without_data import wire_bytes
from gradwire_bench.micro import exchange
from gradwire_bench.micro.exchange_rank import EXCHANGES, TORCH
from tests.bench.testbed.forked import fork_ranks

BENCH = exchange.ExchangeBench(hosts=2, rate_bytes_per_s=1000.0, numel=90, repeats=2)


def rows(shaped: bool) -> dict[str, dict[str, Any]]:
    """Rows of two ranks that took 1 and 2 s for everything, and 4 s for dense."""
    results = [
        {
            name: {
                "seconds": [4.0 if name == "dense" else at, at],
                "sent_bytes": [100, 300],
            }
            for name in (TORCH, *EXCHANGES)
        }
        for at in (1.0, 2.0)
    ]
    made = [exchange._row(BENCH, name, results, shaped) for name in results[0]]
    return {str(row["name"]): row for row in made}


def test_every_compressor_is_measured_as_it_comes() -> None:
    for name in names("compress"):
        shown = "dense" if name == "none" else name
        assert EXCHANGES[shown] == exchange_for(load("compress", name)())


@pytest.mark.smoke
def test_bytes_are_means_over_ranks_and_the_floor_is_the_busiest_rank() -> None:
    """90 float32 in chunks of 48 and 42 around a ring of two: each rank sends both."""
    found = rows(shaped=True)
    row = found["ring"]
    assert row["formula_bytes_per_step"] == 360
    assert row["wire_bytes_per_step"] == 200
    assert (row["num_hosts"], row["link_bytes_per_s"], row["numel"]) == (2, 1000.0, 90)
    stated = wire_bytes(EXCHANGES["onebit-casync_ring"], exchange.message_spec(90), 2)
    row = found["onebit-casync_ring"]
    assert row["formula_bytes_per_step"] == pytest.approx(sum(stated) / 2)
    assert row["floor_s"] == pytest.approx(max(stated) / 1000)
    assert row["time_vs_floor"] == pytest.approx(2.0 / row["floor_s"])


def test_on_hosts_of_several_ranks_each_exchange_has_two_rows() -> None:
    """The floor is that of the host's link, which its ranks share."""
    bench = exchange.ExchangeBench(
        hosts=2, ranks_per_host=2, only=("onebit", "powersgd")
    )
    names = [
        name for flat in ("dense", *bench.only) for name in (flat, f"{flat}-on_hosts")
    ]
    assert bench.names == names
    assert exchange._stated_bytes("dense", bench) == []
    shares = exchange._stated_bytes("dense-on_hosts", bench)
    # two hosts: all-reduces of each half, both ways
    assert shares == [4 * bench.numel] * 2
    spec = exchange.message_spec(bench.numel, 2)
    # Two matrices, one for each rank, send the bytes that two hosts of one rank send of
    # both.
    low_rank = exchange._stated_bytes("powersgd-on_hosts", bench)
    assert low_rank == wire_bytes(EXCHANGES["powersgd"], spec, 2)


@pytest.mark.multi
def test_ranks_send_the_bytes_that_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch, exchange)
    bench = exchange.ExchangeBench(hosts=2, numel=100_000, repeats=1, only=("onebit",))
    torchs, dense, onebit = exchange.run(bench, lambda fraction, what: None)
    assert [row["name"] for row in (torchs, dense, onebit)] == [
        TORCH,
        "dense",
        "onebit",
    ]
    for row in (dense, onebit):
        stated = float(str(row["formula_bytes_per_step"]))
        assert stated <= float(str(row["wire_bytes_per_step"])) < 1.1 * stated + 10_000
    assert float(str(onebit["wire_bytes_per_step"])) < 0.1 * float(
        str(dense["wire_bytes_per_step"])
    )
