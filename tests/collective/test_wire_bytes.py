"""What each collective costs on the wire, worked out by hand from its docstring."""

from __future__ import annotations

import pytest

import gradwire as gw

MILLION = gw.TensorSpec("layer", 1_000_000)
none, onebit, topk = gw.compress.none(), gw.compress.onebit(), gw.compress.topk(density=0.01)


def slot(size_bytes: int) -> int:
    return -(-size_bytes // 8) * 8


@pytest.mark.parametrize("collective", [gw.collective.allreduce(), gw.collective.ring()], ids=repr)
def test_dense_all_reduce_is_bandwidth_optimal(collective) -> None:
    """Patarasu and Yuan 2009: 2(W-1)/W of the data a rank."""
    assert gw.pair(none, collective).wire_bytes(MILLION, 4) == [2 * 3 * 4_000_000 // 4] * 4


def test_parameter_server_sends_each_payload_once_each_way() -> None:
    """HiPress, section 3.1: W-1 chunks pushed, W-1 pulled."""
    exchange = gw.pair(gw.compress.onebit(block=65536), gw.collective.casync_ps())
    chunk = slot(8 * 4 + 250_000 // 8)  # 250,000 elements are four blocks of 65536
    assert exchange.wire_bytes(MILLION, 4) == [3 * chunk + 3 * chunk] * 4


def test_compressed_ring_sends_what_the_parameter_server_does() -> None:
    ring, ps = gw.collective.casync_ring(), gw.collective.casync_ps()
    assert gw.pair(onebit, ring).wire_bytes(MILLION, 4) == gw.pair(onebit, ps).wire_bytes(
        MILLION, 4
    )


def test_all_gather_grows_with_the_world() -> None:
    exchange = gw.pair(topk, gw.collective.allgather_sparse())
    assert exchange.wire_bytes(MILLION, 4) == [3 * 80_000] * 4
    assert exchange.wire_bytes(MILLION, 8) == [7 * 80_000] * 8


def test_unequal_chunks_cost_unequal_bytes() -> None:
    """9 elements among 2 ranks are chunks of 8 and 1: each rank pulls what it does not have."""
    spec = gw.TensorSpec("bias", 9)
    assert gw.pair(none, gw.collective.casync_ring()).wire_bytes(spec, 2) == [32 + 8, 32 + 8]
    assert gw.pair(none, gw.collective.casync_ps()).wire_bytes(spec, 2) == [8 + 32, 32 + 32]


def test_alone_nothing_is_sent() -> None:
    assert gw.pair(onebit, gw.collective.casync_ps()).wire_bytes(MILLION, 1) == [0]
