"""Two hosts' program for `checked`; run by path, never imported.

    python -I -S _probe.py NUM_TURNS SECONDS

Host 1 sends small datagrams that host 0 sends back, one at a time, and then as much as
its link takes. Host 0 reads its interface over so many seconds, and host 1 prints
``RATE ROUND_TRIP ...`` in bytes per second and seconds. Standard library only.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

PORT = 5001
ASK_S = 0.2
PIECE = bytes(32_000)
READY = b"ready"
# One socket keeps bytes for 3 ms of a link of 500 Mbit, less than a busy machine needs.
NUM_SENDERS = 8
NUM_PARTS = 9


def received_bytes() -> int:
    """Bytes that the interface has received, as the kernel counts."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    found = [line for line in lines if line.strip().startswith("eth0:")]
    return int(found[0].partition(":")[2].split()[0])


def measured_rate(seconds: float) -> float:
    """Bytes per second of the interface, once the link has been full for a while.

    It is the median of several parts: in some of them a busy machine may have had no
    time for the senders.
    """
    time.sleep(seconds / 2)
    rates = []
    for _ in range(NUM_PARTS):
        started_bytes = received_bytes()
        started_s = time.monotonic()
        time.sleep(seconds / NUM_PARTS)
        gained = received_bytes() - started_bytes
        rates.append(gained / (time.monotonic() - started_s))
    return sorted(rates)[NUM_PARTS // 2]


def serve(link: socket.socket, seconds: float) -> None:
    """Sends small datagrams back; measures when a large one comes."""
    link.bind(("", PORT))
    asker: tuple[str, int] = ("", 0)
    while True:
        text, sender = link.recvfrom(1 << 16)
        if len(text) == len(PIECE):
            break
        asker = sender
        link.sendto(text, asker)
    rate = measured_rate(seconds)
    for _ in range(20):
        link.sendto(f"{rate}".encode(), asker)
        time.sleep(0.01)


def round_trip(link: socket.socket, text: bytes) -> float:
    """Seconds until a datagram has come back; asks again where none does."""
    link.settimeout(30.0)
    started_s = time.perf_counter()
    link.send(text)
    while link.recv(64) != text:
        pass
    return time.perf_counter() - started_s


def connect(link: socket.socket) -> None:
    """Returns once the other host answers."""
    link.connect((os.environ["MASTER_ADDR"], PORT))
    link.settimeout(ASK_S)
    while True:
        try:
            link.send(READY)
            if link.recv(64) == READY:
                return
        except (TimeoutError, ConnectionRefusedError):
            time.sleep(ASK_S)


def fill(address: str) -> None:
    """Sends as much as the link takes, for as long as the process lives."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect((address, PORT))
        while True:
            # Nobody may listen there any more.
            with contextlib.suppress(ConnectionRefusedError):
                link.send(PIECE)


def said_rate(link: socket.socket) -> str:
    """The other host's rate, which it says once the link has been full for a while."""
    for _ in range(NUM_SENDERS):
        threading.Thread(target=fill, args=link.getpeername()[:1], daemon=True).start()
    link.settimeout(None)
    while (text := link.recv(64)) == READY:
        pass
    return text.decode()


def main() -> None:
    num_turns = int(sys.argv[1])
    seconds = float(sys.argv[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        if os.environ["RANK"] == "0":
            serve(link, seconds)
            return
        connect(link)
        trips = [round_trip(link, f"{turn}".encode()) for turn in range(num_turns)]
        print(said_rate(link), *trips)


main()
