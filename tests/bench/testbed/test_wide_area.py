"""Far and unlike links: when each frame is due, what options mean, and hosts that have
such links.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradwire_bench.testbed
from gradwire.errors import InvalidSetting
from gradwire.kernels.libraries import load_library
from gradwire_bench.auto import auto
from gradwire_bench.demo.demo import Demo
from gradwire_bench.errors import TestbedUnavailable
from gradwire_bench.schedule.schedule import ScheduleBench
from gradwire_bench.testbed import forwarder as forwarder_module
from gradwire_bench.testbed import hosts as hosts_module
from gradwire_bench.testbed.checked import judge
from gradwire_bench.testbed.forwarder import ForwarderCounters
from gradwire_bench.testbed.hosts import HostLinks, Testbed, open_hosts, shaped_hosts
from gradwire_bench.testbed.launch import launch
from gradwire_bench.testbed.wide_area import WideArea, parse_slow
from tests.each import each

PROBE = str(Path(gradwire_bench.testbed.__file__).with_name("_probe.py"))
TRANSFER = str(Path(__file__).with_name("transfer.py"))
MS = 1_000_000
DROPPED = -1
UNLIMITED = (0, 0, 0)

Frame = tuple[int, int, int, int]
"""When it left its host in ns, its source, its target, its bytes."""


@pytest.fixture(scope="module")
def library() -> Any:
    built = load_library("forwarder", Path(gradwire_bench.testbed.__file__).parent)
    if built is None:
        pytest.skip("no C++ compiler")
    return built


def numbers(values: Any) -> Any:
    flat = [number for value in values for number in value]
    return (ctypes.c_int64 * len(flat))(*flat)


def due(
    library: Any,
    frames: list[Frame],
    *,
    delay_ns: int = 0,
    jitter_ns: int = 0,
    links: tuple[tuple[int, int, int], ...] = (UNLIMITED,) * 3,
    asks_often: bool = True,
) -> list[int]:
    """The time at which each frame is due."""
    times = (ctypes.c_int64 * len(frames))()
    library.schedule_frames(
        len(links),
        delay_ns,
        jitter_ns,
        numbers(links),
        numbers(frames),
        len(frames),
        int(asks_often),
        times,
    )
    return list(times)


def test_a_frame_is_due_after_the_delay(library: Any) -> None:
    frames = [(0, 0, 1, 100), (5, 1, 0, 1500), (5, 2, 1, 60)]
    assert due(library, frames, delay_ns=80 * MS) == [80 * MS, 80 * MS + 5, 80 * MS + 5]


def test_frames_pass_at_the_receivers_rate_behind_a_burst(library: Any) -> None:
    # 1,000 bytes a ms, after a burst of 1 ms
    link = (1_000_000, MS, 1 << 20)
    frames = [(10 * MS, source, 2, 1000) for source in (0, 1, 0, 1)]
    times = due(library, frames, delay_ns=MS, links=(link, link, link))
    assert times == [11 * MS, 12 * MS, 13 * MS, 14 * MS]
    other = due(library, [*frames, (10 * MS, 0, 1, 1000)], links=(link, link, link))
    assert other[-1] == 10 * MS, "the links of two receivers are not one"


def test_the_queue_drops_what_does_not_fit(library: Any) -> None:
    link = (1_000_000, 0, 2500)
    frames = [(0, 0, 1, 1000)] * 4 + [(MS, 0, 1, 1000)]
    times = due(library, frames, links=(link, link))
    assert times == [MS, 2 * MS, DROPPED, DROPPED, 3 * MS]


def busy_frames() -> list[Frame]:
    return [
        (turn * MS // 3, turn % 3, (turn + 1 + turn % 2) % 3, 200 + 37 * (turn % 40))
        for turn in range(600)
    ]


def test_jitter_keeps_the_order_of_two_hosts_and_its_bounds(library: Any) -> None:
    frames = busy_frames()
    times = due(library, frames, delay_ns=20 * MS, jitter_ns=5 * MS)
    last: dict[tuple[int, int], int] = {}
    changed = 0
    for (left_ns, source, target, _), due_ns in zip(frames, times, strict=True):
        assert 20 * MS <= due_ns - left_ns <= 25 * MS
        assert due_ns >= last.get((source, target), 0)
        changed += due_ns < max(last.values(), default=0)
        last[source, target] = due_ns
    assert changed > 0, "others' frames overtake"
    assert len({due - frame[0] for frame, due in zip(frames, times, strict=True)}) > 100


def test_a_late_forwarder_changes_no_due_time(library: Any) -> None:
    link = (400_000, MS, 8000)
    given: dict[str, Any] = {"delay_ns": 7 * MS, "jitter_ns": MS, "links": (link,) * 3}
    often = due(library, busy_frames(), **given)
    assert often == due(library, busy_frames(), **given, asks_often=False)
    assert DROPPED in often
    assert len(set(often)) > 100


def left(library: Any, sizes: list[int], *, empty_ns: int, now_ns: int) -> list[int]:
    """When frames left their host: 1,000 bytes a ms, and a burst of 1 ms."""
    times = (ctypes.c_int64 * len(sizes))()
    given = (ctypes.c_int64 * len(sizes))(*sizes)
    library.date_frames(1_000_000, MS, empty_ns, now_ns, given, len(sizes), times)
    return list(times)


def test_frames_that_were_read_late_are_dated_at_the_senders_rate(library: Any) -> None:
    now = 100 * MS
    alone = left(library, [1000], empty_ns=0, now_ns=now)
    burst = left(library, [500, 500, 900], empty_ns=0, now_ns=now)
    many = left(library, [1000] * 5, empty_ns=0, now_ns=now)
    since = left(library, [1000] * 5, empty_ns=99 * MS, now_ns=now)
    assert alone == [now]
    assert burst == [now - 0.4 * MS, now, now]
    assert many == [now - lag * MS for lag in (3, 2, 1, 0, 0)]
    assert since == [now - lag * MS for lag in (1, 1, 1, 0, 0)]


def test_a_large_piece_has_headers_for_each_frame_on_a_wire(library: Any) -> None:
    header = 14 + 20 + 32
    segment = 1448
    for payload, num_frames in ((100, 1), (1448, 1), (1449, 2), (14_480, 10)):
        offload = struct.pack("=BBHHHH", 1, 1, header, segment, 34, 16)
        frame = bytearray(header + payload)
        frame[34 + 12] = 8 << 4
        piece = offload + frame
        found = library.piece_wire_bytes(bytes(piece), len(piece))
        assert found == payload + num_frames * header
    plain = bytes(10) + bytes(60)
    assert library.piece_wire_bytes(plain, len(plain)) == 60


@each(
    "given, said",
    [
        ({"delay_s": -0.001}, "delay_s must be 0 to 10 seconds, got -0.001"),
        ({"delay_s": float("nan")}, "delay_s must be 0 to 10 seconds"),
        ({"jitter_s": 11.0}, "jitter_s must be 0 to 10 seconds"),
        ({"up_bytes_per_s": 1.0}, "up_bytes_per_s must be between 12500"),
        ({"down_bytes_per_s": 1e12}, "down_bytes_per_s must be between 12500"),
        ({"slow": ((1, 0.0),)}, "rate of slow host 1 must be between 12500"),
        ({"slow": ((1, 1e6), (1, 2e6))}, "slow hosts must be each host once"),
    ],
)
def test_bad_links_are_refused_in_words(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        WideArea(**given)
    assert said in str(caught.value)


def test_a_slow_host_is_one_of_the_hosts() -> None:
    with pytest.raises(InvalidSetting, match="one of the 2 hosts, 0 to 1, got 2"):
        Testbed(hosts=2, wide_area=WideArea(slow=((2, 1e6),)))


@each("text", ["3", "=1mbit", "x=1mbit", "3=", "-1=1mbit", "3=fast", "1=2=3mbit"])
def test_a_slow_host_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="write"):
        parse_slow([text])


def test_links_have_the_rates_that_were_asked_for() -> None:
    far = WideArea(up_bytes_per_s=1e6, slow=tuple(parse_slow(["host1=4mbit"])))
    links = [Testbed(hosts=3, wide_area=far).link_shapers(host) for host in range(3)]
    assert [link.up.rate_bytes_per_s for link in links] == [1e6, 5e5, 1e6]
    assert [link.down.rate_bytes_per_s for link in links] == [62.5e6, 5e5, 62.5e6]
    assert far.least(62.5e6) == 5e5
    assert str(far) == ", 8.00 Mbit/s up, host1 at 4.00 Mbit/s"


FAR = WideArea(delay_s=0.01, up_bytes_per_s=1e6, slow=((1, 5e5),))


def test_benches_make_the_hosts_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "shaped_hosts", lambda testbed: testbed)
    made = auto._hosts(auto.AutoBench(rates=(2e6,), wide_area=FAR), 3e6)
    assert made.wide_area == FAR
    assert Demo(wide_area=FAR).testbed.wide_area == FAR
    assert Demo(wide_area=FAR).link_bytes_per_s == 5e5
    bench = ScheduleBench(wide_area=FAR, scale=4.0, slowdown=2.0)
    links = bench.testbed.wide_area
    assert links.delay_s == 0.02
    assert links.up(0, bench.link_bytes_per_s) == 1e6 / 8
    assert links.up(1, bench.link_bytes_per_s) == 5e5 / 8
    assert links.down(0, bench.link_bytes_per_s) == 1.25e9 / 8


def test_the_loopback_is_never_far() -> None:
    with pytest.raises(InvalidSetting, match="cannot have 10 ms one way"):
        auto.AutoBench(rates=(2e6, None), wide_area=FAR)
    auto.AutoBench(rates=(2e6, None))


def counters(**given: Any) -> ForwarderCounters:
    figures: dict[str, Any] = {
        "num_frames": 1000,
        "num_dropped": 3,
        "num_late": 2,
        "processor_s": 1.0,
        "seconds": 10.0,
        "busiest": 0.4,
    }
    return ForwarderCounters(**{**figures, **given})


def test_the_forwarder_says_what_it_took_and_when_it_was_the_limit() -> None:
    said = str(counters())
    assert "1.00 s of processor time, busy 10% of 10.00 s" in said
    assert "40% of its busiest second" in said
    assert "limit" not in said
    assert "the forwarder was the limit" in str(counters(busiest=0.95))
    assert "the machine had no time for it" in str(counters(num_late=60))


@each(
    "figures, trip, rate",
    [
        ([1.0e6, 0.041, 0.0415, 0.9], True, True),
        ([0.96e6, 0.0425], False, True),
        ([0.94e6, 0.04], True, False),
        ([1.06e6, 0.0375], False, False),
    ],
)
def test_the_check_allows_a_twentieth(
    figures: list[float], trip: bool, rate: bool
) -> None:
    far = WideArea(delay_s=0.02, down_bytes_per_s=1e6)
    checked = judge(Testbed(hosts=2, wide_area=far), figures)
    assert (checked.has_round_trip, checked.has_rate) == (trip, rate)


def test_the_check_allows_half_a_millisecond_and_the_jitter() -> None:
    near = Testbed(hosts=2, rate_bytes_per_s=1e6)
    assert judge(near, [1e6, 0.0004]).has_round_trip
    assert not judge(near, [1e6, 0.0006]).has_round_trip
    jitter = WideArea(delay_s=0.01, jitter_s=0.005)
    checked = judge(Testbed(hosts=2, wide_area=jitter), [62.5e6, 0.0295])
    assert checked.has_round_trip


def refuse(*_: object, **__: object) -> None:
    return None


def test_without_a_compiler_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gradwire.kernels.libraries.load_library", refuse)
    with pytest.raises(TestbedUnavailable, match=r"need a C\+\+ compiler"):
        forwarder_module.compiled_forwarder()
    hosts_module._say_once.cache_clear()
    with open_hosts(Testbed(hosts=2, wide_area=WideArea(delay_s=0.01))) as hosts:
        assert not hosts.shaped
    assert "at full speed and without delay: " in caplog.text


@each(
    "said, why",
    [
        ("echo denied no tun", "links with delay need TAP devices (no tun)"),
        ("true", "links with delay need TAP devices (the forwarder ended)"),
    ],
)
def test_without_tap_devices_the_error_says_why(
    monkeypatch: pytest.MonkeyPatch, said: str, why: str
) -> None:
    monkeypatch.setattr(forwarder_module, "compiled_forwarder", lambda: Path("/none"))
    opened = forwarder_module.open_forwarder(["sh", "-c", said], 2, FAR)
    with pytest.raises(TestbedUnavailable) as caught, opened:
        pass
    assert str(caught.value).startswith(why)


def test_an_ended_forwarder_is_an_error_and_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarder_module, "compiled_forwarder", lambda: Path("/none"))
    opened = forwarder_module.open_forwarder(["sh", "-c", "echo ready"], 2, FAR)
    with opened as forwarder, pytest.raises(TestbedUnavailable, match="has ended"):
        forwarder.counters()


# ---- hosts that are far --------------------------------------------------------------
#
# Only lower bounds are of seconds: a busy machine is later, and never earlier.


@pytest.mark.netns
@pytest.mark.parametrize("privilege", ["root", "user namespace"])
def test_far_hosts_have_their_round_trip_and_count_bytes(
    monkeypatch: pytest.MonkeyPatch, privilege: str
) -> None:
    if privilege not in hosts_module._privileges():
        pytest.skip("needs root")
    monkeypatch.setattr(hosts_module, "_privileges", lambda: (privilege,))
    far = WideArea(delay_s=0.02, down_bytes_per_s=2.5e6)
    with shaped_hosts(Testbed(hosts=2, wide_area=far)) as hosts:
        before = hosts.read_counters()
        command = [sys.executable, TRANSFER, "300000"]
        exits = launch(hosts, command, output="none", timeout_s=100, check=True)
        receiver, sender = (
            now.since(then)
            for now, then in zip(hosts.read_counters(), before, strict=True)
        )
        done = hosts.namespaces.forwarder.counters()
    # a round trip from "go" to the first byte, and the bytes behind the burst
    seconds = float(exits[0].last_lines[0].split()[1])
    assert seconds > 0.04 + 0.5 * 300_000 / 2.5e6
    assert 300_000 < receiver.rx_bytes <= sender.tx_bytes < 600_000
    assert done.num_frames > 10
    assert done.processor_s > 0


@pytest.mark.netns
def test_a_cut_far_link_loses_all_and_is_mended() -> None:
    # so long that a frame sent into a cut link would come after it is mended
    settings = Testbed(hosts=2, wide_area=WideArea(delay_s=0.3))
    send = (
        "import socket, sys\n"
        "link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "link.sendto(sys.argv[1].encode(), ('10.77.0.1', 5000))\n"
    )
    listen = (
        "import socket\n"
        "link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "link.bind(('', 5000))\n"
        "print(flush=True)\n"
        "print(link.recv(64).decode(), flush=True)\n"
    )
    with shaped_hosts(settings) as hosts:
        links = HostLinks(hosts, settings)
        command = hosts.command_on(0, [sys.executable, "-c", listen])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
            listener.stdout.readline()
            for harm, text in (
                (lambda: links.cut(0), "cut"),
                (lambda: links.cut(1), "cut"),
                (lambda: links.mute(1), "mute"),
                (lambda: links.part([0]), "part"),
                (lambda: None, "whole"),
            ):
                harm()
                sender = [sys.executable, "-c", send, text]
                subprocess.run(hosts.command_on(1, sender), check=True)
                links.mend()
            assert listener.stdout.readline().strip() == "whole"


@pytest.mark.netns
@pytest.mark.slow
def test_the_check_measures_the_delay_at_least_and_a_limited_rate() -> None:
    far = WideArea(delay_s=0.01, up_bytes_per_s=1.25e6)
    settings = Testbed(hosts=2, wide_area=far)
    with shaped_hosts(settings) as hosts:
        words = [sys.executable, "-I", "-S", PROBE, "5", "1"]
        exits = launch(hosts, words, output="none", timeout_s=100, check=True)
    figures = [float(word) for word in exits[1].last_lines[-1].split()]
    checked = judge(settings, figures)
    assert len(figures) == 6
    assert min(figures[1:]) > 0.02
    # what a late forwarder has kept comes at once, so this is far from the 5 %
    assert checked.rate_bytes_per_s < 2 * 1.25e6
