"""Handle: the object that ``attach`` returns; a model's exchanges as the user sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ..contract import Exchange
from ..data.plan import Plan
from ..error_feedback import residuals as residuals_of
from ..errors import InvalidSetting
from ..trace.span import Span, Trace
from . import checkpoint
from .accounting import density_of_step, outgrown, spread
from .engine import Engine
from .lanes import wall_clock
from .loading import Loading
from .membership import run_of
from .messages import Message
from .overlap import Overlap
from .planned import algorithm
from .recorder import Recorder
from .scaling import scale_of
from .shards import place_in
from .synchroniser import Synchroniser

_log = logging.getLogger("gradwire")
_FIRST_LOOK = 64


def _looks_after(num_steps: int) -> bool:
    """Whether residuals are compared with gradients: after 64 steps, 128, 256 and so on.

    Before 64 steps residuals may still be filling up. Such rare looks cost next to nothing.
    """
    return num_steps >= _FIRST_LOOK and num_steps.bit_count() == 1


class Handle:
    """One attached model. Made by ``gw.attach``; ended by ``detach``."""

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange | Plan,
        engine: Engine,
        synchroniser: Synchroniser,
        recorder: Recorder,
        scaler: GradScaler | None = None,
    ) -> None:
        self.exchange = exchange
        self._model, self._engine = model, engine
        self.synchroniser, self._recorder = synchroniser, recorder
        self._scaler = scaler
        self._step = 0
        self._num_backward = 0
        self._forward_end_s = 0.0
        self._syncing = True
        self.attached = True
        self.overlap: Overlap | None = None
        self._algorithm = algorithm(exchange) if isinstance(exchange, Plan) else repr(exchange)
        self._on_detach: list[Callable[[], None]] = []
        self._warned = False
        self._run = run_of(engine.who)

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
        """Settles all that a plan which overlaps the next forward pass has left pending.

        It waits for all gradients and makes all updates that ``optimizer.step()`` asked for. Call
        it before parameters are read or written by hand between ``step()`` and the next forward
        pass; ``state_dict()`` of model and optimizer and evaluation do so themselves.
        """
        if self.overlap is not None:
            self.overlap.settle(None)

    def stats(self) -> dict[str, Any]:
        """Figures of the run so far on this rank.

        - ``wire_bytes_per_step`` counts the bytes that the collectives send.
        - ``wait_s_per_step`` is how long backward waited for the network after its own end.
        - ``communication_s_per_step`` adds up all channels, waits for peers included.
        - ``residual_norm`` is over all parameters; its mean over ranks (DEFT's equation 2) is
          ``gw.mean_residual_norm``.
        - ``density_asked`` is the density that was set, ``density_local`` the one that this rank
          selected and ``density_actual`` that of the mean, over all steps and messages that select
          elements. Each is None where no message selects, the first also where none was set.
        - ``overlapped_steps`` counts steps that the next forward pass did not wait for.
        - ``fallbacks`` counts, by reason, steps of an overlapping plan that it did wait for.
        - ``ways`` says how the rows of each embedding went in the last step: by a scheme, or by the
          inner exchange.
        - ``push_imbalance`` and ``pull_imbalance`` are the largest among the messages of the last
          step (ZEN, definition 8), None where no message was cut into parts.
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
        """The residuals of this rank by parameter name: gradient that the mean does not hold yet.

        Parameters without a residual are left out.
        """
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
        """The state of this rank's exchanges, by parameter name; save one file for each rank."""
        self._between_steps("state_dict()")
        self.synchronize()
        run = f"{self._run}.{self._engine.num_loads}"
        return checkpoint.collect(self._messages(), self._origin, step=self._step, run=run)

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Continues where ``state_dict`` was saved, bit for bit.

        All ranks of the group (and of ``shards``) must call this, between the same two steps, each
        with the state that it saved itself. They agree on it before any of them loads. With
        ``strict=False`` parameters that the state lacks begin afresh, and state of parameters that
        the model lacks is dropped.

        Raises ``InvalidSetting`` for the state of another rank, shard, number of ranks, algorithm
        or model, or a damaged one, and ``RanksDiffer`` if another rank refused or has a state of
        another moment: in both cases the present state stays. For another number of ranks use
        ``gw.redistribute``. Raises ``RankFailed`` if a rank trains on without loading.
        """
        loading = Loading(self._engine)
        try:
            self._between_steps("load_state_dict()")
            self.synchronize()
            messages = self._messages()
            states = checkpoint.loaded(state_dict, messages, self._origin, strict=strict)
        except Exception as error:
            loading.refuse(error)
            raise
        loading.agree(state_dict, strict=strict, next_step=self._step)
        for message, state in zip(messages, states, strict=True):
            message.state = state
        self._step = self._num_backward = state_dict["step"]

    @property
    def _origin(self) -> checkpoint.Origin:
        shard = place_in(self._engine.shards)
        return checkpoint.Origin(self._algorithm, self.world_size, self.rank, shard)

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
        """Registers a function that ``detach`` calls to undo a change."""
        self._on_detach.append(undo)

    def give_up(self, text: str) -> BaseException:
        """Fails on behalf of this rank in the step that is next to end; see `Engine.give_up`."""
        return self._engine.give_up(text, step=self._step)

    def begin_step(self) -> None:
        """Opens a step at the first gradient of a backward pass."""
        for message in self._messages():
            message.notes_norms = _looks_after(self._step + 1) and not self._warned
        self.synchroniser.begin(self._step, scale_of(self._scaler))

    def mark_backward(self, end_s: float) -> None:
        """Notes the end of a backward pass, which began when the forward pass ended."""
        if self._forward_end_s:
            self._span("backward", self._forward_end_s, end_s)
        self._num_backward += 1

    def mark_wait(self, start_s: float, end_s: float) -> None:
        """Notes a wait of the training loop for the network."""
        self._span("wait", start_s, end_s)

    def end_step(self) -> None:
        """Closes a step whose means have all arrived."""
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
        if _looks_after(self._step) and not self._warned:
            self._warn_of_outgrown()

    def _warn_of_outgrown(self) -> None:
        found = outgrown(self.synchroniser.messages)
        if found:
            self._warned = True
            name, factor = found[0]
            _log.warning(
                "after %d steps the residual of %s has %.0f times the norm of its gradient (%d "
                "tensors are like it): what is kept does not get through, and training may stand "
                "still; take a smaller block, more bits or a higher density, or exclude the "
                "tensor by compress_if",
                self._step,
                name,
                factor,
                len(found),
            )

    def mark_forward(self, start_s: float, end_s: float) -> None:
        """Notes a forward pass, which may end before the step of the last backward pass does."""
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
