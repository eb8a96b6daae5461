"""Controls: what a pilot may do with an attached model between two steps.

A pilot changes the plan of a model that trains. All ranks do the same after the same
step: what a pilot decides must follow from what they all know. Messages are replaced,
and their state goes over by parameter name, as a checkpoint's does. Process groups
stay: they are opened once, at attach.

Residuals of parameters whose next exchange keeps none are delivered: for one step such
a message travels dense, with its residuals added to the gradient, and takes its own
exchange after that. A step that the loss scaler skips delivers nothing, so the message
travels dense once more.

On hosts of several ranks each rank keeps state of a share, and another plan cuts other
shares. So a host's ranks put their shares together first, and each takes its new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..compress.none import none
from ..contract.compressor import KeywordSettings
from ..contract.verbs import AllReduce, Among, Steps
from ..exchange.by_name import exchange_for
from ..exchange.error_feedback import with_error_feedback
from ..exchange.two_level import on_hosts
from ..planning.data.cluster import Cluster
from ..planning.data.plan import Plan
from .ddp.comm_hook import DDPHooks, DDPInTurn
from .engine.engine import Engine
from .overlap.overlap import Overlap
from .state import checkpoint
from .state.table import copied, is_by_element
from .step.hooks import ModuleHooks
from .step.layout import ParamRange
from .step.messages import Message, Placement
from .step.progress import Progress

_DELIVERING = with_error_feedback(exchange_for(none()))


class Flight(ABC):
    """One attached model under a pilot; its methods are called on all ranks alike."""

    @abstractmethod
    def step_ended(self) -> None:
        """Acts after a backward pass, when means are there or left to the overlap."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Figures and decisions so far, for ``handle.stats()``."""

    @abstractmethod
    def end(self) -> None:
        """Removes all hooks of its own."""


class Pilot(KeywordSettings, ABC):
    """Settings that ``attach`` takes in place of a plan, to choose one in mid-run.

    The ``repr`` must show the settings, as ranks compare them by it.
    """

    @property
    def compressors(self) -> Sequence[str]:
        """The names of the compressors that it measures, which ranks compare."""
        return ()

    @abstractmethod
    def begin(self, controls: Controls) -> Flight:
        """Takes over a model, whose gradients travel dense."""


class Controls:
    """One attached model, as its pilot reaches it.

    ``make_messages`` makes the messages of a plan; for None, dense messages.
    ``overlapping`` makes the overlap of the next forward pass. It is None if the user
    gave no optimizer, and under DDP.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[tuple[str, Tensor]],
        progress: Progress,
        hooks: ModuleHooks | DDPHooks | DDPInTurn,
        make_messages: Callable[[Plan | None], list[Message]],
        overlapping: Callable[[], Overlap] | None,
    ) -> None:
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        """The DDP model around ``model``, if there is one."""
        self.model: nn.Module = model if self.ddp is None else self.ddp.module
        self.params = dict(params)
        self._progress = progress
        self._hooks = hooks
        self._make_messages = make_messages
        self._overlapping = overlapping
        self.plan: Plan | None = None
        """The plan in force; None while gradients travel dense, as without a plan."""
        # of overlaps that have ended
        self._num_overlapped = 0
        self._fallbacks = Counter[str]()
        self._delivery_exchange = on_hosts(_DELIVERING, self.engine.ranks_per_host)
        self._is_delivering = False
        self._cluster: Cluster | None = None
        self._flight: Flight | None = None
        self.in_turn = hooks if isinstance(hooks, DDPInTurn) else None
        """The hooks themselves, if DDP's own reducer averages dense gradients."""
        hooks.on_end = self._step_ended
        progress.on_decided = self._deliver

    @property
    def engine(self) -> Engine:
        return self._progress.synchroniser.engine

    @property
    def can_overlap(self) -> bool:
        """Whether plans can overlap the next forward pass."""
        return self._overlapping is not None

    def begin(self, pilot: Pilot) -> Flight:
        """Hands the model over to its pilot."""
        self._flight = pilot.begin(self)
        return self._flight

    def settle(self) -> None:
        """Waits for all that an overlapping plan has left pending."""
        if self._hooks.overlap is not None:
            self._hooks.overlap.settle(None)

    def switch(self, plan: Plan | None) -> None:
        """Makes gradients travel by another plan from the next step on.

        No state is lost.
        """
        self.settle()
        self.plan = plan
        wants_overlap = plan is not None and plan.overlap_forward and self.can_overlap
        if wants_overlap is not (self._hooks.overlap is not None):
            self._set_overlap(wants_overlap)
        saved = self.of_host(checkpoint.collect(self._progress.messages))
        begun = self._begun()
        if begun is not None:
            begun = begun._replace(saved=self.of_host(begun.saved))
        self.put(self.prepared(saved, begun=begun))

    def _begun(self) -> checkpoint.BegunStep | None:
        """The step about which a scaler has not decided yet.

        Without a scaler it is None, on all ranks alike.
        """
        if not self._progress.synchroniser.undoes_skipped:
            return None
        return checkpoint.begun_step(self._progress.messages)

    def of_host(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state with all that this host's ranks have kept, each for its share.

        A rank has zeros where it keeps nothing, so the sum of the bytes is what was
        kept. All ranks call this alike.
        """
        if self.engine.ranks_per_host == 1:
            return saved
        params = copied(saved["params"])

        def steps() -> Steps[None]:
            for _, fields in sorted(params.items()):
                for path in sorted(filter(is_by_element, fields)):
                    if fields[path].numel():
                        yield AllReduce(fields[path].view(torch.uint8), Among.HOST)

        self.engine.wait([self.engine.launch(0, "shares", steps())])
        return {**saved, "params": params}

    def prepared(
        self,
        saved: Mapping[str, Any],
        delivering: Iterable[int] | None = None,
        begun: checkpoint.BegunStep | None = None,
    ) -> list[Message]:
        """Messages of the plan in force with a state, collected under any plan.

        Messages at the places ``delivering`` deliver residuals first; by default all
        messages that have to. The scaler may still skip the step that was ``begun``.
        """
        made = self._make_messages(self.plan)
        if self._cluster is not None:
            for message in made:
                message.know(self._cluster)
        owed = self._delivery_exchange
        who = self.engine.who
        if delivering is None:
            delivering = checkpoint.messages_without_residuals(saved, made)
        for place in delivering:
            ranges = [
                ParamRange(slot.name, self.params[slot.name], slot.first, slot.last)
                for slot in made[place].slots
            ]
            placement = Placement(after=made[place].after)
            made[place] = Message(place, ranges, owed, who.rank, who.world, placement)
        checkpoint.move(saved, made, begun)
        return made

    def put(self, messages: Sequence[Message]) -> None:
        """Puts messages that were prepared in the place of the present ones."""
        self._progress.synchroniser.replace(messages)
        self._is_delivering = any(
            m.exchange is self._delivery_exchange for m in messages
        )
        engine = self.engine
        plan = self.plan
        most = engine.num_channels if plan is None else plan.credit
        engine.use(min(most, max(1, len(messages))))
        if self.in_turn is not None:
            self.in_turn.use_messages(plan is not None or self._is_delivering)

    def know(self, cluster: Cluster) -> None:
        """Gives ranks and links to exchanges that choose a scheme in each step."""
        self._cluster = cluster
        for message in self._progress.messages:
            message.know(cluster)

    def guard(self, every: int) -> None:
        """Compares means with dense means at times, unless the user already does."""
        self._progress.compare(every)

    def missed(self) -> float | None:
        """The relative error of the means compared since the last call.

        None if there were none.
        """
        return None if self._progress.guard is None else self._progress.guard.take()

    @contextmanager
    def on_all_channels(self) -> Iterator[Engine]:
        """The engine, for messages of the pilot's own.

        No message of the model is under way.
        """
        self.settle()
        before = self.engine.credit
        self.engine.use(self.engine.num_channels)
        try:
            yield self.engine
        finally:
            self.engine.use(before)

    def stats(self) -> dict[str, Any]:
        """The flight's figures, and the counts of all overlaps."""
        num_overlapped = self._num_overlapped
        fallbacks = self._fallbacks
        if (overlap := self._hooks.overlap) is not None:
            num_overlapped += overlap.num_overlapped
            fallbacks = fallbacks + overlap.fallbacks
        is_left_to_ddp = self.in_turn is not None and self.in_turn.is_left_to_ddp
        return {
            "overlapped_steps": num_overlapped,
            "fallbacks": dict(fallbacks),
            "pilot": None if self._flight is None else self._flight.stats(),
            "averaged_by": "DDP" if is_left_to_ddp else "gradwire",
        }

    def end(self) -> None:
        """Ends the flight, and the overlap if there is one."""
        if self._flight is not None:
            self._flight.end()
        if self._hooks.overlap is not None:
            self._set_overlap(False)

    def _step_ended(self) -> None:
        synchroniser = self._progress.synchroniser
        if self._is_delivering:
            self.settle()
            if not synchroniser.undoes_skipped:
                synchroniser.taken |= synchroniser.used()
            self._deliver()
        if self._flight is not None:
            with torch.device("cpu"):  # whatever the user's default is
                self._flight.step_ended()

    def _deliver(self) -> None:
        """Gives messages their own exchange, once they have delivered old residuals.

        A parameter's residual is delivered once an optimizer takes its mean. If no rank
        used the parameter, or the scaler skipped the step, its message goes on to
        deliver.
        """
        if not self._is_delivering:
            return
        taken = self._progress.synchroniser.taken
        present = self._progress.messages
        delivers = {
            place: message.names
            for place, message in enumerate(present)
            if message.exchange is self._delivery_exchange
        }
        owes = [place for place in delivers if not taken.issuperset(delivers[place])]
        if owes != [*delivers]:
            saved = checkpoint.collect(present)
            self.put(self.prepared(saved, owes, self._begun()))

    def _set_overlap(self, is_wanted: bool) -> None:
        hooks = self._hooks
        if is_wanted:
            assert self._overlapping is not None
            hooks.overlap = self._overlapping()
        elif hooks.overlap is not None:
            self._num_overlapped += hooks.overlap.num_overlapped
            self._fallbacks += hooks.overlap.fallbacks
            hooks.overlap.detach()
            hooks.overlap = None
