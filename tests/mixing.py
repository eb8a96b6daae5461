"""The order in which workers take tests: some compute while others wait for ranks."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadGroupScheduling


class Mixed(LoadGroupScheduling):
    """Every other worker takes tests from the end of the queue.

    Files of tests that start ranks are at its front, as they are the largest groups,
    and tests that only compute are at its end. Ranks wait for each other more than they
    compute.
    """

    def _assign_work_unit(self, node: Any) -> None:
        if self.nodes.index(node) % 2:
            last = next(reversed(self.workqueue))
            self.workqueue.move_to_end(last, last=False)
        super()._assign_work_unit(node)
