"""SurvivingHooks: a DDP model goes on without lost ranks.

DDP has collectives of its own, in the group that it was made with. After a loss they
would raise errors of torch's, or wait. So a DDP model has a group of this rank alone
while it is attached, in which none of them waits for another rank. Collectives that
must have all ranks are refused (`pairs`): of buffers, and of unused parameters.

DDP sees no failure. Its futures complete together, as a backward pass ends. Where the
step does not count they never do, and the next forward pass begins with a new reducer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...errors import RankFailed
from ..step.hooks import Shrinks
from ..step.progress import Progress
from ..transport.task_graph import wall_clock
from ..transport.wire import Group
from .comm_hook import DDPHooks, _Bucket, renew_reducer


class SurvivingHooks(DDPHooks):
    """Hands DDP's buckets in, and ends each step where ranks can go on without a rank.

    ``shrinking`` is the way to go on, set before the first step.
    """

    shrinking: Shrinks

    def __init__(
        self,
        progress: Progress,
        params: list[tuple[str, Tensor]],
        ddp: DistributedDataParallel,
    ) -> None:
        super().__init__(progress, params, ddp)
        self._ddp = ddp
        self._buckets: list[_Bucket] = []
        self._failure: RankFailed | None = None
        """The loss of a rank that the end of the backward pass has yet to handle."""
        self._call_off: Callable[[], None] = lambda: None

    def stand_alone(self, group: Group) -> None:
        """Has the model's own collectives reach ``group`` alone, from now on."""
        self._ddp.process_group = group
        self.drop()

    def rejoin(self, group: Group) -> None:
        """Gives the model back to DDP, among the ranks of ``group``."""
        self._ddp.process_group = group
        self._call_off()
        renew_reducer(self._ddp)

    def drop(self) -> None:
        """Drops the step under way, and its reducer with it."""
        self._buckets = []
        self._failure = None
        self._call_off()
        # not now, as the reducer may be in the midst of a call
        self._call_off = renew_reducer(self._ddp, self)

    def serve(self, bucket: Any) -> torch.futures.Future[Tensor] | None:
        try:
            if self._failure is None:
                if not self._open_if_needed():
                    return None
                self._buckets.append(self._hand_in(bucket))
                if not self._synchroniser.complete:
                    return self._buckets[-1].future
        except RankFailed as failure:
            self._failure = failure
        # again, as the first bucket may have come in a nested backward pass
        self._progress.queue_end(self._end_backward)
        return torch.futures.Future() if self._failure else self._buckets[-1].future

    def _begin(self) -> None:
        self.shrinking.before_step()
        super()._begin()

    def _end_backward(self) -> None:
        failure = self._failure
        buckets = self._buckets
        if failure is None and not (buckets and self._synchroniser.complete):
            return
        self._failure = None
        self._buckets = []
        try:
            if failure is not None:
                self._ddp.zero_grad()  # of what came after it
                raise failure
            self._progress.record_backward(wall_clock())
            self._progress.finish()
        except RankFailed as lost:
            self.shrinking.failed(lost)
        for bucket in buckets:
            bucket.complete(None)
