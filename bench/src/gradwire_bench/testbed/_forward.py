"""The process that keeps frames between a testbed's hosts; run by path, never imported.

    python -I -S _forward.py LIBRARY NUM_HOSTS DELAY_NS JITTER_NS

It runs in the holder's network namespace and makes a TAP device there for each host,
port0, port1 and so on, which its owner then moves to the hosts. It prints
``ready`` or ``denied WHY``, forwards frames (`forwarder.cpp`), and ends when its
standard input does. The devices go with it. Standard library only, so that it starts in
20 ms.
"""

import contextlib
import ctypes
import fcntl
import os
import struct
import sys

TUNSETIFF = 0x400454CA  # linux/if_tun.h
TUNSETOFFLOAD = 0x400454D0
IFF_TAP_WITHOUT_INFO_WITH_OFFLOAD = 0x2 | 0x1000 | 0x4000
TUN_F_CSUM_AND_TSO4 = 0x1 | 0x2
PR_SET_TIMERSLACK = 29  # linux/prctl.h


def open_tap(name: str) -> int:
    """A new device, which hands over large pieces whole, and its file."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    asked = struct.pack("16sH22x", name.encode(), IFF_TAP_WITHOUT_INFO_WITH_OFFLOAD)
    fcntl.ioctl(device, TUNSETIFF, asked)
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM_AND_TSO4)
    return device


def main() -> None:
    num_hosts = int(sys.argv[2])
    try:
        taps = [open_tap(f"port{host}") for host in range(num_hosts)]
        library = ctypes.CDLL(sys.argv[1])
    except OSError as problem:
        print(f"denied {problem}", flush=True)
        raise SystemExit(1) from None
    # A timer may be 1 ns late in place of 50 us.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    # As an interrupt would, it goes before the ranks; a user who may not ask for it has
    # longer delays on a busy machine.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    library.run_forwarder(
        (ctypes.c_int32 * num_hosts)(*taps),
        ctypes.c_int64(num_hosts),
        ctypes.c_int64(int(sys.argv[3])),
        ctypes.c_int64(int(sys.argv[4])),
    )


main()
