"""ReplicaHooks: models of sharded layers go on without lost replicas.

The ranks of a replica hold a model's shards together, and wait for each other in
collectives of FSDP or of DTensors. So a loss is raised only where a backward pass ends:
by then all ranks of the replica have made its collectives. There each of them says
whether it has all means. Then all of them end the step, or none does. If only some did,
they would wait for the others in the next forward pass, and the others would wait for
them to connect anew.

Ranks of a replica say this on a channel of their own, which other replicas' losses do
not close.

If a rank's own replica has lost a rank, torch raises an error first, in a collective.
If this error ends the script, gradwire adds an error that names the lost rank, and the
exit code is that of the loss.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ...contract.verbs import AllReduce
from ...errors import RankFailed
from ..liveness.blame import CAUSES
from ..transport.task_graph import Task, wall_clock
from ..transport.wire import begin, give_back, in_background, open_channels
from .hooks import ModuleHooks

_LOOK_S = 0.5
"""Seconds between two looks for a loss that other ranks announce."""


class ReplicaHooks(ModuleHooks):
    """Hands gradients in, and ends each step on all ranks of a replica or on none.

    ``join`` is called before the first step.
    """

    _failure: RankFailed | None = None
    """The loss of a rank that the end of the backward pass has yet to handle."""

    def join(self, undo: ExitStack) -> None:
        """Connects the ranks of the replica, until ``undo`` is closed."""
        engine = self._synchroniser.engine
        # a rank may have to wait for the time-out before it tells of a loss
        patience = 4 * engine.timeout
        opening = partial(open_channels, *engine.replica[:3], 1, patience)
        self._channels = engine.meanwhile("connect", opening)
        undo.callback(give_back, self._channels)
        CAUSES.add(self)

    def _accept(self, name: str, param: Any) -> None:
        if self._progress.backward() is None:
            # an earlier pass may have raised before its end
            self._failure = None
        if self._failure:
            param.grad = None
        else:
            super()._accept(name, param)

    def _lost(self, failure: RankFailed) -> None:
        """Keeps a loss until the backward pass ends, if an end will come."""
        if self._progress.backward() is None:
            super()._lost(failure)
        else:
            self._failure = failure

    def _end(self) -> None:
        if not self._failure:
            # the loss of a rank in another model's step has ended this one
            if not self._synchroniser.open:
                return
            self._do(self._close)
        try:
            self.finish()
        except RankFailed as failure:
            super()._lost(failure)

    def finish(self) -> None:
        """Waits for the means, and ends the step on all ranks of the replica.

        Raises ``RankFailed`` on all of them if one of them lacks a mean.
        """
        start_s = wall_clock()
        engine = self._synchroniser.engine
        if not self._failure:
            self._do(engine.wait, self._synchroniser.all_ends())
        failure = self._failure
        self._failure = None
        self._leave_if_torn(failure)
        num_failed_1 = torch.zeros(1, device="cpu") + bool(failure)
        heard: Future[None] = Future()

        def over(error: BaseException | None) -> None:
            if error is None:
                heard.set_result(None)
            else:
                heard.set_exception(error)

        begin(AllReduce(num_failed_1), self._channels[0], over)
        while not wait([heard], _LOOK_S).done:
            self._leave_if_torn(engine.failure)
        engine.carry("hear of its replica", heard.result, self._progress.step)
        if failure:
            raise failure
        if num_failed_1:
            # Never done: the wait ends when the alarm of the loss comes here, too.
            engine.wait([Task("the loss that another rank has heard of", None)])
        self._progress.record_wait(start_s, wall_clock())
        self._progress.put_means()

    def _leave_if_torn(self, failure: BaseException | None) -> None:
        """Raises a loss in this rank's own replica, whose ranks leave together."""
        replica = self._synchroniser.engine.replica
        if isinstance(failure, RankFailed) and replica.in_group(failure.ranks):
            # others of the replica notice that the channel closes, and leave too; gloo
            # closes it only once its all-reduce has ended
            in_background(partial(give_back, self._channels))
            raise failure

    def cause_of(self, error: BaseException) -> RankFailed | None:
        """The loss behind an error of torch's, which takes seconds to find.

        None if no rank is lost.
        """
        if isinstance(error, RuntimeError):
            try:
                self._do(self._synchroniser.engine.refuse_silence, self._progress.step)
            except RankFailed as end:
                return end
        return None
