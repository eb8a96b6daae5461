"""What a rank runs in the tests: all other ranks send BYTES to rank 0, which prints the
seconds.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import without_torch  # noqa: F401  (must come before gradwire)

from gradwire_bench.testbed.counters import own_counters

SIZE_BYTES = int(sys.argv[1])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def connect() -> socket.socket:
    while True:
        try:
            return socket.create_connection(ADDRESS)
        except ConnectionRefusedError:
            time.sleep(0.01)


def drain(link: socket.socket) -> None:
    link.sendall(b"go")
    left = SIZE_BYTES
    while left:
        left -= len(link.recv(1 << 20))


if RANK == 0:
    server = socket.create_server(ADDRESS)
    links = [server.accept()[0] for _ in range(WORLD - 1)]
    started_s = time.monotonic()
    readers = [threading.Thread(target=drain, args=(link,)) for link in links]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    print("seconds", time.monotonic() - started_s)
else:
    link = connect()
    link.recv(2)
    link.sendall(bytes(SIZE_BYTES))
    link.recv(1)
counted = own_counters()
print("counted", counted.interface, counted.tx_bytes, counted.rx_bytes)
