"""Handle: what ``attach`` returns; a model's exchanges as the user sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..contract import Exchange
from ..errors import InvalidSetting
from ..exchange import residuals as residuals_of
from ..planner._types import Plan
from ..trace.span import Span, Trace
from . import checkpoint
from .accounting import density_of_step, spread
from .engine import Engine
from .lanes import wall_clock
from .messages import Message
from .overlap import Overlap
from .planned import algorithm
from .recorder import Recorder
from .shards import place_in
from .synchroniser import Synchroniser


class Handle:
    """One attached model. Made by ``gw.attach``; ended by ``detach``."""

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange | Plan,
        engine: Engine,
        synchroniser: Synchroniser,
        recorder: Recorder,
    ) -> None:
        self.exchange = exchange
        self._model, self._engine = model, engine
        self.synchroniser, self._recorder = synchroniser, recorder
        self._step = 0
        self._num_backward = 0
        self._forward_end_s = 0.0
        self._syncing = True
        self.attached = True
        self.overlap: Overlap | None = None
        self._algorithm = algorithm(exchange) if isinstance(exchange, Plan) else repr(exchange)
        self._on_detach: list[Callable[[], None]] = []

    @property
    def rank(self) -> int:
        return self._engine.rank

    @property
    def world_size(self) -> int:
        return self._engine.world

    @property
    def step(self) -> int:
        """Number of exchanged backward passes so far."""
        return self._step

    @property
    def syncing(self) -> bool:
        """Whether the backward pass that runs now is to be exchanged."""
        return self._syncing and self.attached

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside accumulate on this rank and are not exchanged.

        For a DistributedDataParallel model this is its own ``no_sync``.
        """
        if isinstance(self._model, DistributedDataParallel):
            with self._model.no_sync():
                yield
            return
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def synchronize(self) -> None:
        """Makes true what a plan that overlaps the next forward pass has left pending.

        Waits for all gradients and makes all updates that ``optimizer.step()`` asked for. Call it
        before parameters are read or written by hand between ``step()`` and the next forward pass;
        ``state_dict()`` of model and optimizer and evaluation do so themselves.
        """
        if self.overlap is not None:
            self.overlap.settle(None)

    def stats(self) -> dict[str, Any]:
        """Figures of the run so far on this rank.

        ``wire_bytes_per_step`` counts what the collectives send; ``wait_s_per_step`` is how long
        backward waited for the network after its own end; ``communication_s_per_step`` adds up all
        channels, waits for peers included; ``residual_norm`` is over all parameters (its mean over
        ranks, DEFT's equation 2, is ``gw.mean_residual_norm``); ``density_asked`` is what was set,
        ``density_local`` what this rank selected and ``density_actual`` what of all ranks is in the
        mean, over all steps and messages that select, each None where nothing does or was asked;
        ``overlapped_steps`` are those that the next forward pass did not wait for, ``fallbacks``
        counts, by reason, those of an overlapping plan that it did wait for; ``ways`` says how the
        rows of each embedding went in the last step (a scheme, or the inner exchange),
        ``push_imbalance`` and ``pull_imbalance`` are the largest of its messages (ZEN, definition
        8), None where none was cut into parts.
        """
        norms = [
            torch.linalg.vector_norm(residual, dtype=torch.float64)
            for residual in self.residuals().values()
        ]
        return {
            **self._recorder.stats(),
            "rank": self.rank,
            "world_size": self.world_size,
            "messages": len(self.synchroniser.messages),
            "residual_norm": sum(float(norm) ** 2 for norm in norms) ** 0.5,
            "overlapped_steps": 0 if self.overlap is None else self.overlap.num_overlapped,
            "fallbacks": {} if self.overlap is None else dict(self.overlap.fallbacks),
            **spread(self.synchroniser.messages),
        }

    def residuals(self) -> dict[str, Tensor]:
        """What was not delivered yet, by parameter name; parameters without are left out."""
        found: dict[str, Tensor] = {}
        keeps_some = any(residuals_of(message.state) for message in self._messages())
        if keeps_some and self.overlap is not None:
            self.overlap.settle("stats() or residuals() read what is still being exchanged")
        for message in self._messages():
            for tensor in residuals_of(message.state).values():
                for slot in message.slots:
                    if slot.name not in found:
                        found[slot.name] = tensor.new_zeros(self.synchroniser.numel(slot.name))
                    found[slot.name][slot.first : slot.last] += tensor[slot.start : slot.stop]
        return found

    def trace(self) -> Trace:
        """Spans of the last steps on this rank, and their densities where elements are selected."""
        return self._recorder.trace()

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps between steps, by parameter name; save one file a rank."""
        self._between_steps("state_dict()")
        self.synchronize()
        return checkpoint.collect(
            self._messages(),
            algorithm=self._algorithm,
            rank=self.rank,
            world=self.world_size,
            shard=place_in(self._engine.shards),
            step=self._step,
        )

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Continues where ``state_dict`` was saved, bit for bit.

        Raises ``InvalidSetting`` for the state of another rank, shard, number of ranks, algorithm
        or model; for another number of ranks use ``gw.redistribute``.
        """
        self._between_steps("load_state_dict()")
        self.synchronize()
        checkpoint.check(
            state_dict,
            algorithm=self._algorithm,
            rank=self.rank,
            world=self.world_size,
            shard=place_in(self._engine.shards),
        )
        checkpoint.distribute(state_dict, self._messages(), strict=strict)
        self._step = self._num_backward = int(state_dict["step"])

    def detach(self) -> None:
        """Removes every hook; the model is then as it was before ``attach``.

        A DistributedDataParallel model goes back to its plain all-reduce. Residuals are dropped:
        save ``state_dict()`` first to keep them.
        """
        if self.attached:
            self._between_steps("detach()", takes_a_torn_step=True)
            self.attached = False
            with ExitStack() as stack:  # everything is undone even if a lost peer is noticed here
                stack.callback(self._engine.close)
                for undo in reversed(self._on_detach):
                    stack.callback(undo)

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Registers what ``detach`` must undo."""
        self._on_detach.append(undo)

    def give_up(self, text: str) -> BaseException:
        """Fails on behalf of this rank in the step that is next to end; see `Engine.give_up`."""
        return self._engine.give_up(text, step=self._step)

    def begin_step(self) -> None:
        """Opens a step at the first gradient of a backward pass."""
        self.synchroniser.begin(self._step)

    def mark_backward(self, end_s: float) -> None:
        """Notes the end of a backward pass, which began when the forward pass ended."""
        if self._forward_end_s:
            self._span("backward", self._forward_end_s, end_s)
        self._num_backward += 1

    def mark_wait(self, start_s: float, end_s: float) -> None:
        """Notes a wait of the training loop for the network."""
        self._span("wait", start_s, end_s)

    def end_step(self) -> None:
        """Closes a step whose means are there."""
        counters, now_s = self._engine.counters, wall_clock()
        density = density_of_step(
            self.synchroniser.messages,
            rank=self.rank,
            step=self._step,
            end_s=now_s,
            sent_bytes=counters.sent_bytes,
        )
        self._recorder.end_step(counters, now_s, density)
        self._step += 1

    def mark_forward(self, start_s: float, end_s: float) -> None:
        """Notes a forward pass; it may end before the step of the backward pass before it does."""
        self._recorder.add(
            Span(self.rank, "forward", "forward", start_s, end_s, step=self._num_backward)
        )
        self._forward_end_s = end_s

    def _span(self, lane: str, start_s: float, end_s: float) -> None:
        self._recorder.add(Span(self.rank, lane, lane, start_s, end_s, step=self._step))

    def _messages(self) -> list[Message]:
        return [m for m in self.synchroniser.messages if isinstance(m, Message)]

    def _between_steps(self, what: str, *, takes_a_torn_step: bool = False) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise InvalidSetting(
                f"{what} was called during a backward pass; call it after loss.backward() returned"
            )
        is_pending = self.overlap is not None and self.overlap.is_open
        if self.synchroniser.open and not is_pending and not takes_a_torn_step:
            raise InvalidSetting(
                f"{what} was called after a backward pass that raised before its end: part of the "
                "step is still being exchanged; run a whole step first, or detach()"
            )
