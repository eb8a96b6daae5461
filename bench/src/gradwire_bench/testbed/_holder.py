"""The process that keeps a testbed's network namespaces alive; run by path, never
imported.

    python -I -S _holder.py {root|user} NUM_HOSTS CONGESTION_CONTROL

It enters a network namespace of its own (which gets the bridge; with ``user`` inside a
new user namespace, where it is root), and forks one child per host, each in a further
network namespace. It then prints ``ready PID PID ...``, ``denied WHY`` or
``congestion WHY``, and waits until its standard input closes. That happens when its
owner closes it and just as well when the owner is killed, so no namespace, interface or
rank ever outlives the owner: the kernel takes the namespaces away with their last
process, nothing is registered under a name, and there is nothing to clean up later.
Standard library only, so that it starts in 20 ms.
"""

import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
from pathlib import Path

CLONE_NEWUSER = 0x10000000  # linux/sched.h
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1  # linux/prctl.h

libc = ctypes.CDLL(None, use_errno=True)


class UnusableCongestionControl(OSError):
    """The kernel does not have it, or not for namespaces."""


def unshare(flags: int, what: str) -> None:
    """Leaves the current namespaces for new ones."""
    if libc.unshare(flags) != 0:
        code = ctypes.get_errno()
        why = (
            "none allowed, or as many as allowed in use" if code == errno.ENOSPC else ""
        )
        raise OSError(code, f"{what} namespace: {why or os.strerror(code)}")


def become_root_inside() -> None:
    """Enters a user namespace in which the present user is root."""
    uid = os.getuid()
    gid = os.getgid()
    unshare(CLONE_NEWUSER, "user")
    # else gid_map needs privilege
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1", encoding="ascii")


def net_namespace(pid: int | str = "self") -> int:
    """Identity (inode number) of a process' network namespace."""
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def choose_congestion_control(name: str) -> None:
    """Sets this namespace's TCP congestion control; the machine's own stays as it
    is.
    """
    if name:
        try:
            path = Path("/proc/sys/net/ipv4/tcp_congestion_control")
            path.write_text(name, encoding="ascii")
        except OSError as problem:
            raise UnusableCongestionControl(problem.strerror) from None


def hold_one_host(report: int, congestion_control: str) -> None:
    """A child's whole life: a namespace, a report, waiting."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        unshare(CLONE_NEWNET, "network")
        choose_congestion_control(congestion_control)
        os.write(report, b"+")
    except UnusableCongestionControl as problem:
        os.write(report, f"congestion {problem}".encode())
    except OSError as problem:
        os.write(report, f"denied {problem.strerror}".encode())
    os.close(report)
    while True:
        signal.pause()


def fork_host(congestion_control: str) -> int:
    """Starts one child; returns its pid once its namespace exists."""
    receive, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(0)
        hold_one_host(report, congestion_control)
    os.close(report)
    with os.fdopen(receive, "rb") as reports:
        answer = reports.read()
    if answer != b"+":
        print(answer.decode(), flush=True)
        raise SystemExit(1)
    return pid


def kill_inhabitants(namespaces: set[int]) -> None:
    """Kills every process in these namespaces, and those they start meanwhile."""
    for _ in range(200):
        found = False
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if net_namespace(entry.name) in namespaces:
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.005)


def main() -> None:
    mode = sys.argv[1]
    num_hosts = int(sys.argv[2])
    congestion_control = sys.argv[3]
    outside = net_namespace()
    namespaces: set[int] = set()
    try:
        if mode == "user":
            become_root_inside()
        unshare(CLONE_NEWNET, "network")
        pids = []
        for _ in range(num_hosts):
            pids.append(fork_host(congestion_control))
            namespaces.add(net_namespace(pids[-1]))
    except OSError as problem:
        print(f"denied {problem.strerror}", flush=True)
        raise SystemExit(1) from None
    assert outside not in namespaces, "a host without a namespace of its own"
    print("ready", *pids, flush=True)
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    kill_inhabitants(namespaces)


main()
