"""All bytes of ranks pass through the relay, at the rate that it is given."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Literal

import pytest

from gradwire_bench.testbed.hosts import Testbed, relayed_hosts
from gradwire_bench.testbed.ranks import run_ranks
from gradwire_bench.testbed.relay import Links, Relay, ports_beyond
from gradwire_bench.testbed.wide_area import WideArea
from tests.each import each


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


def test_links_of_a_relay_have_rates_of_their_own() -> None:
    unlike = WideArea(up_bytes_per_s=2e4, slow=((2, 1.25e4),), delay_s=3, jitter_s=2)
    links = Links(1e5, 0.0, unlike)
    assert links.due_s(0, 1, 20_000, 0.0) == 1.0
    assert (
        links.due_s(3, 2, 12_500, 0.0) == 1.0
    )  # its receiver's link is the slower one
    assert links.due_s(2, 1, 12_500, 5.0) == 6.0
    assert links.due_s(0, 4, 20_000, 1.0) == 2.0
    delays = [links.delay_s() for _ in range(100)]
    assert 3.0 <= min(delays) < 3.5 < 4.5 < max(delays) <= 5.0


async def carried(pieces: list[bytes], delay_s: float) -> tuple[list[bytes], float]:
    """What comes out of a relay's way, and the seconds until the first byte."""
    relay = Relay(Links(1e9, 0.0, WideArea(delay_s=delay_s, jitter_s=delay_s)))
    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    clock = asyncio.get_running_loop().time

    async def receive(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while text := await reader.read(1 << 16):
            arrived.put_nowait(text)
        writer.close()
        await writer.wait_closed()
        arrived.put_nowait(b"")

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    reader = asyncio.StreamReader()
    started_s = clock()
    carrying = asyncio.create_task(relay._carry(reader, writer, 0, 1))
    for piece in pieces:
        reader.feed_data(piece)
        await asyncio.sleep(0)
    reader.feed_eof()
    texts = [await arrived.get()]
    seconds = clock() - started_s
    while texts[-1]:
        texts.append(await arrived.get())
    await carrying
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
    return texts, seconds


def test_a_relay_keeps_bytes_back_and_in_order() -> None:
    pieces = [bytes([number]) * 10 for number in range(200)]
    texts, seconds = asyncio.run(carried(pieces, 0.02))
    assert b"".join(texts) == b"".join(pieces)
    assert seconds >= 0.02


ByteOrder = Literal["big", "little"]
ORDERS: tuple[ByteOrder, ...] = ("big", "little")


def is_above(port: int, own_port: int, order: ByteOrder) -> bool:
    """Whether a machine of this order, which reads the bytes of ports, finds ``port``
    above.

    gloo compares so, and the rank whose port is below the other one's listens.
    """
    read = int.from_bytes(port.to_bytes(2, "big"), order)
    return read > int.from_bytes(own_port.to_bytes(2, "big"), order)


@pytest.mark.smoke
@each("order", ORDERS)
@each("above", [True, False])
def test_of_any_two_ranks_behind_the_relay_one_listens(
    order: ByteOrder, above: bool
) -> None:
    # A rank reads one of these ports for every other rank with a port above, or below,
    # its own. So this holds for all pairs: one of a pair has the other one above
    # itself.
    wrong = [
        (own_port, port)
        for own_port in range(1024, 1 << 16)
        for port in islice(ports_beyond(own_port, above=above), 1)
        if is_above(port, own_port, order) is not above
    ]
    assert not wrong, f"{len(wrong)} ports, such as {wrong[0]}"


@each("own_port", [0x0400, 0x80FF, 0x8100, 0x9142, 0xEA60, 0xFFFF])
def test_there_are_ports_on_both_sides_and_none_twice(own_port: int) -> None:
    above = list(ports_beyond(own_port, above=True))
    below = list(ports_beyond(own_port, above=False))
    assert len({own_port, *above, *below}) == 1 + len(above) + len(below)
    assert all(1024 <= port < 1 << 16 for port in [*above, *below])
    wrong = [
        port for port in above if not all(is_above(port, own_port, o) for o in ORDERS)
    ]
    wrong += [
        port for port in below if any(is_above(port, own_port, o) for o in ORDERS)
    ]
    assert not wrong
    if 1 << 15 <= own_port < 61_000:  # where Linux takes free ports from
        assert min(len(above), len(below)) >= 17


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
