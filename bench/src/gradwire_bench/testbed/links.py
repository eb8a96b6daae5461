"""HostLinks that fail: what may happen to the links of shaped hosts while ranks run on them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gradwire.errors import TestbedUnavailable

from .hosts import Hosts, Testbed
from .netns import set_link, set_reach, shape_one
from .tc import choose_shaper


class HostLinks:
    """The links of shaped hosts that were made with these settings."""

    def __init__(self, hosts: Hosts, settings: Testbed) -> None:
        if hosts.namespaces is None:
            raise TestbedUnavailable("plain loopback has no links that could fail")
        self._spaces, self._settings = hosts.namespaces, settings
        self._all = range(len(hosts))

    def cut(self, host: int) -> None:
        """Takes a host's link down: nothing passes either way."""
        set_link(self._spaces, host, up=False)

    def mute(self, host: int) -> None:
        """Loses all that a host sends; what others send still arrives."""
        set_reach(self._spaces, host, ())

    def part(self, side: Collection[int]) -> None:
        """Parts the network: the hosts of a side reach each other, and so do the rest."""
        for host in self._all:
            set_reach(self._spaces, host, [o for o in self._all if (o in side) == (host in side)])

    def slow(self, host: int, rate_bytes_per_s: float) -> None:
        """Gives a host's link another rate."""
        given = replace(self._settings, rate_bytes_per_s=rate_bytes_per_s)
        shape_one(
            self._spaces, host, choose_shaper(given.rate_bytes_per_s, given.mtu, given.burst_s)
        )

    def mend(self) -> None:
        """Makes all links as they were."""
        for host in self._all:
            set_link(self._spaces, host, up=True)
            set_reach(self._spaces, host, self._all)
            self.slow(host, self._settings.rate_bytes_per_s)
