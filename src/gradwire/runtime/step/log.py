"""Log: figures of the run, handed to TensorBoard, wandb or a function every so many steps."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from ...contract.bounds import check_whole
from ...errors import invalid
from ...exchange.error_feedback import residuals
from .messages import Message
from .recorder import Recorder

_log = logging.getLogger("gradwire")
_PREFIX = "gradwire/"


class Log:
    """Figures of the steps since the last row, on this rank alone; nothing is communicated.

    ``to`` has ``add_scalar(name, value, step)`` or ``log(row)``, or is a function of the step and
    a row. It is looked at in this order. Raises ``InvalidSetting`` for anything else.
    """

    def __init__(self, to: Any, every: int, recorder: Recorder) -> None:
        check_whole("every", every, "leave it out for 100")
        self._write, self._every = _writer(to), every
        self._recorder, self._mark = recorder, recorder.mark()

    def is_due(self, step: int) -> bool:
        """Whether a row is written at the end of this step."""
        return (step + 1) % self._every == 0

    def write(self, step: int, messages: Sequence[Message]) -> bool:
        """Writes the row of a step in which ``messages`` noted norms; returns whether that went."""
        row = {**self._recorder.since(self._mark), **_norms(messages)}
        del row["steps"]
        self._mark = self._recorder.mark()
        named = {f"{_PREFIX}{key}": value for key, value in row.items() if value is not None}
        try:
            self._write(step, named)
        except Exception as error:  # a full disk, or a lost connection, ends no training
            _log.warning("nothing more is logged, as step %d could not be: %r", step, error)
            return False
        return True


def _norms(messages: Sequence[Message]) -> dict[str, float]:
    """The norms of residuals, and of this rank's gradients beside them; empty where none is kept.

    Where the first runs away from the second, what is kept does not get through.
    """
    keeping = [(message, list(residuals(message.state).values())) for message in messages]
    keeping = [(message, kept) for message, kept in keeping if kept]
    if not keeping:
        return {}
    return {
        "residual_norm": math.hypot(*(float(own.norm()) for _, kept in keeping for own in kept)),
        "gradient_norm": math.hypot(*(norm for message, _ in keeping for norm in message.norms)),
    }


def _writer(to: Any) -> Callable[[int, dict[str, float]], object]:
    scalar: Any = getattr(to, "add_scalar", None)
    log: Any = getattr(to, "log", None)
    if _takes(scalar, "", 0.0, 0):
        return lambda step, row: [scalar(name, value, step) for name, value in row.items()]
    if _takes(log, {}):
        # Not wandb's step=, of which the user's own rows may be ahead: wandb drops what is late.
        return lambda step, row: log({**row, f"{_PREFIX}step": step})
    if _takes(to, 0, {}):
        return to  # type: ignore[no-any-return]
    accepted = "a SummaryWriter, a wandb run, or a function of a step and a dict of figures"
    raise invalid("the first argument of log_to", to, accepted, "pass one of these, or None")


def _takes(function: Any, *args: Any) -> bool:
    """Whether a function can be called with these arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # some of C's have no signature
        return True
    return True
