"""The program that the clean-up tests end: a testbed whose ranks sleep.

It prints who keeps the namespaces, and the pids of each rank; rank 1's line is on
stderr. With ``raise`` as argv[1] it fails while processes still run. With ``far`` its
hosts are far, and the forwarder is one of the keepers.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import without_torch  # noqa: F401  (must come before gradwire)

from gradwire_bench.testbed.hosts import Testbed, shaped_hosts
from gradwire_bench.testbed.launch import launch
from gradwire_bench.testbed.wide_area import WideArea

# Whatever started the tests: who starts them in the background has SIGINT ignored by
#     all below.
signal.signal(signal.SIGINT, signal.default_int_handler)

SLEEP = ["sleep", "300"]
# A second process in a session of its own, which no signal to the rank's process group
# reaches.
RANK = "setsid sleep 300 & echo $$ $!; exec sleep 300"

far = WideArea(delay_s=0.001 * ("far" in sys.argv))
with shaped_hosts(Testbed(hosts=2, wide_area=far)) as hosts:
    spaces = hosts.namespaces
    keepers = [spaces.holder_pid, *spaces.pids]
    if spaces.forwarder is not None:
        keepers.append(spaces.forwarder.pid)
    print(spaces.privilege.replace(" ", "-"), *keepers, flush=True)
    if sys.argv[1:] == ["raise"]:
        left_behind = [
            subprocess.Popen(hosts.command_on(host, SLEEP)) for host in (0, 1)
        ]
        print(*(one.pid for one in left_behind), flush=True)
        raise ZeroDivisionError
    launch(hosts, ["sh", "-c", RANK], output="all")
