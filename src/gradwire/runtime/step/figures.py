"""Figures: what ``stats()``, ``trace()`` and ``log_to()`` tell of a run on this rank.

The recorder keeps the spans of the last steps and running totals. After each step every
message has a ``Member.selection``: how many elements it selected. The sums over
messages give the step's densities. Nothing here communicates.
"""

import inspect
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...contract import Member, Selection, State
from ...contract.bounds import check_whole
from ...contract.state import leaves
from ...contract.thread_scratch import thread_scratch_bytes
from ...contract.trace.span import Span, StepDensity, Trace
from ...errors import InvalidSetting, invalid, log
from ...exchange.error_feedback import residuals
from ..device.streams import Staging
from ..engine.engine import OFFLOAD
from .messages import Message

_PREFIX = "gradwire/"
_TIMED = ("wire_bytes", "compute_s", "communication_s", "wait_s")
_SELECTED = {
    "asked": "density_asked",
    "local": "density_local",
    "actual": "density_actual",
}

Totals = Mapping[str, float]
"""Sums over one step, or over all so far, by name."""


class Recorder:
    """Keeps the spans of the last ``num_steps`` steps, and totals of all of them."""

    def __init__(self, num_steps: int) -> None:
        self._lock = threading.Lock()
        # One more than asked for: the last is the step that is going on.
        self._steps: deque[list[Span]] = deque([[]], maxlen=num_steps + 1)
        self._densities: deque[StepDensity | None] = deque(maxlen=num_steps)
        self._step_s: deque[float] = deque(maxlen=1000)
        self._began_s: float | None = None
        self._totals: defaultdict[str, float] = defaultdict(float)
        self.num_steps = 0

    def add(self, span: Span) -> None:
        with self._lock:
            spans = self._steps[-1]
            if span.lane == "forward" and spans and spans[-1].lane == "forward":
                spans.pop()  # Evaluation between steps must not pile up.
            spans.append(span)

    def costs(self, step: int) -> Totals:
        """Costs so far of the open ``step``: bytes sent and seconds of each lane."""
        found = dict.fromkeys(_TIMED, 0.0)
        with self._lock:
            for span in self._steps[-1]:
                seconds = span.end_s - span.start_s
                if span.lane == "wait":
                    found["wait_s"] += seconds
                elif span.message >= 0 and span.step == step:
                    found["wire_bytes"] += span.size_bytes
                    is_sent = span.lane == "communication"
                    found["communication_s" if is_sent else "compute_s"] += seconds
        return found

    def end_step(
        self, costs: Totals, now_s: float, density: StepDensity | None = None
    ) -> None:
        """Closes a step: adds its costs and opens a new list of spans."""
        with self._lock:
            totals = self._totals
            self._densities.append(density)
            if density is not None:
                totals["numel"] += density.numel
                # NaN stands for a density that was not set, and stays.
                totals["asked"] += math.nan if density.asked is None else density.asked
                totals["local"] += density.selected
                totals["actual"] += density.arrived
            self.num_steps += 1
            for name, cost in costs.items():
                totals[name] += cost
            if self._began_s is not None:
                self._step_s.append(now_s - self._began_s)
            self._began_s = now_s
            self._steps.append([])

    def trace(self) -> Trace:
        with self._lock:
            spans = (span for spans in self._steps for span in spans)
            return Trace.of(spans, filter(None, self._densities))

    def snapshot(self) -> Totals:
        """The totals so far, to count from."""
        with self._lock:
            return {**self._totals, "steps": self.num_steps}

    def since(self, snapshot: Totals) -> dict[str, float | None]:
        """Averages per step.

        ``step_s`` is the median time from one step's end to the next.

        A density is None where nothing was selected, or none was set.
        """
        with self._lock:
            done = defaultdict(
                float, {k: v - snapshot.get(k, 0.0) for k, v in self._totals.items()}
            )
            num_steps = self.num_steps - int(snapshot.get("steps", 0))
            last = list(self._step_s)[-num_steps:] if num_steps else []
        steps = max(1, num_steps)
        numel = done["numel"]
        return {
            "steps": num_steps,
            "step_s": median(last) if last else 0.0,
            "wire_bytes_per_step": done["wire_bytes"] / steps,
            "compute_s_per_step": done["compute_s"] / steps,
            "communication_s_per_step": done["communication_s"] / steps,
            "wait_s_per_step": done["wait_s"] / steps,
            **{
                key: done[name] / numel
                if numel and not math.isnan(done[name])
                else None
                for name, key in _SELECTED.items()
            },
        }

    def stats(self) -> dict[str, float | None]:
        """Averages over all steps, as of ``since``."""
        return self.since({})


def density_of_step(
    messages: Iterable[Message], *, rank: int, step: int, end_s: float, sent_bytes: int
) -> StepDensity | None:
    """The last step's density over all messages.

    None where no message selects elements.
    """
    found: list[tuple[int, Selection]] = [
        (message.own_numel, message.member.selection)
        for message in messages
        if message.member.selection is not None
    ]
    numel = sum(numel for numel, _ in found)
    if not numel:
        return None
    asked = sum(selection.asked for _, selection in found)
    return StepDensity(
        rank,
        step,
        end_s,
        sent_bytes,
        numel=numel,
        asked=None if math.isnan(asked) else asked,
        selected=sum(selection.selected for _, selection in found),
        arrived=sum(selection.arrived for _, selection in found),
    )


def adapted(messages: Iterable[Message]) -> dict[str, str]:
    """The settings of each layer, in words, by parameter name.

    Empty without ``adapt``.
    """
    found = {}
    for message in messages:
        if message.chooser is not None:
            settings = message.chooser.settings(message.state)
            for slot, setting in zip(message.slots, settings, strict=True):
                found[slot.name] = setting
    return found


def spread(messages: Iterable[Any]) -> dict[str, Any]:
    """Figures of the last step's sparse messages: the way that each embedding's rows
    took, and the largest imbalance of a push and of a pull (None where no message was
    cut into parts).
    """
    ways: dict[str, str] = {}
    parts = []
    for message in messages:
        member = message.member
        if member.way:
            ways |= dict.fromkeys(message.names, member.way)
        if member.imbalance is not None:
            parts.append(member.imbalance)
    return {
        "ways": ways,
        "push_imbalance": max((one.push for one in parts), default=None),
        "pull_imbalance": max((one.pull for one in parts), default=None),
    }


def norm_over_all(tensors: Iterable[Tensor]) -> float:
    """The norm of tensors as one vector, whose squares are added up in float64."""
    norms = (
        torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors
    )
    return math.hypot(*map(float, norms))


def whereabouts(
    messages: Sequence[Any],
    staging: Staging,
    num_steps: int,
    backend: Mapping[str, Any],
) -> dict[str, Any]:
    """Figures of where messages are encoded, and of what a step copies for that.

    Messages are counted by their gradients' device, or under "cpu" where gradients are
    copied to the host first. Bytes are of payloads and, where the host encodes, of
    gradients; row-sparse ones aside. Payloads pass through ``pinned_bytes`` of host
    memory. So do tensors that a plan has encoded ``early``: ``offloaded`` counts them,
    and their bytes on the way to the host. ``backend`` names what carries payloads
    ``within_hosts`` (where "memory" is shared by ranks) and ``between_hosts``, and says
    ``why`` NCCL cannot (see `backends`).
    """
    steps = max(1, num_steps)
    lanes = [lane for message in messages for lane in message.lanes.values()]
    offloaded = {
        "tensors": lanes.count(OFFLOAD),
        "bytes_per_step": staging.offloaded_bytes / steps,
    }
    return {
        "backend": dict(backend),
        "encoded_on": dict(Counter(str(message.device) for message in messages)),
        "to_host_bytes_per_step": staging.to_host_bytes / steps,
        "to_device_bytes_per_step": staging.to_device_bytes / steps,
        "pinned_bytes": staging.pinned_bytes,
        "offloaded": offloaded,
    }


OUTGROWN = 100.0
"""The most that the norm of a tensor's residual may be, in norms of its gradient.

Where elements are selected, the limit is this number divided by the density. In
trainings that go well the residual's norm is a few tens of the gradient's at most.
"""


def outgrown(messages: Iterable[Message]) -> list[tuple[str, float]]:
    """Tensors with residuals beyond ``OUTGROWN`` times their gradient, worst first.

    Each comes with the norm of its residual over that of its gradient in the last step
    that noted norms.
    """
    found = []
    for message in messages:
        kept = list(residuals(message.state).values())
        if not kept or not message.norms:  # none were noted yet
            continue
        taken = message.member.selection
        numel = message.own_numel
        density = taken.asked / numel if taken is not None and taken.asked > 0 else 1.0
        for slot, norm in zip(message.slots, message.norms, strict=True):
            parts = (message.part(slot, residual_N) for residual_N in kept)
            owed = math.hypot(*(float(part.norm()) for part in parts))
            if math.isfinite(norm) and owed > OUTGROWN / density * norm > 0:
                found.append((str(slot), owed / norm))
    return sorted(found, key=lambda one: -one[1])


def mean_residual_norm(stats: Sequence[Mapping[str, Any]]) -> float:
    """The error of a sparsifier: the mean over ranks of the norms of their residuals.

    Source: DEFT (ICPP 2023), equation 2.

    Args:
        stats: The result of ``handle.stats()`` of every rank at one step, in any order.
            The caller gathers them, for instance by
            ``torch.distributed.all_gather_object``, which then all ranks must call.

    Returns:
        The mean norm.

    Raises:
        InvalidSetting: A rank is missing, or is there twice.

    >>> first = {"rank": 0, "world_size": 2, "residual_norm": 1.0}
    >>> second = {"rank": 1, "world_size": 2, "residual_norm": 2.0}
    >>> mean_residual_norm([second, first])
    1.5
    """
    ranks = sorted(int(one["rank"]) for one in stats)
    world = int(stats[0]["world_size"]) if stats else 1
    if ranks != list(range(world)):
        raise InvalidSetting(
            f"mean_residual_norm needs the stats of all {world} ranks once each, got "
            f"those of ranks {ranks}; gather handle.stats() of every rank"
        )
    return math.fsum(one["residual_norm"] for one in stats) / world


KINDS = (
    "residuals",
    "momentum",
    "state",
    "messages",
    "payloads",
    "buffers",
    "receives",
    "thread_scratch",
)
"""The kinds are gradients that were not sent yet; velocities; the rest of states;
copies of gradients; sent and received payloads; buffers that a message needs in a later
computation; what receives fill that are posted ahead (see `direct`); and buffers for
one computation, which all messages of this process share (see `thread_scratch`).
"""
_MOMENTUM = ("velocity", "momentum")


def kept_bytes(state: State, member: Member) -> Counter[str]:
    """Bytes of a message's state and of its member's buffers, by kind."""
    found: Counter[str] = Counter()
    owed = {tensor.data_ptr() for tensor in residuals(state).values() if tensor.numel()}
    for path, tensor in leaves(state):
        is_momentum = path.rpartition(".")[2].startswith(_MOMENTUM)
        own = "momentum" if is_momentum else "state"
        found["residuals" if tensor.data_ptr() in owed else own] += tensor.nbytes
    for buffer in member.buffers.values():
        found["payloads" if buffer.dtype == torch.uint8 else "buffers"] += buffer.nbytes
    return found


def memory_of(
    messages: Iterable[Any], receives_bytes: int, numel: int
) -> dict[str, float]:
    """Bytes of all messages by kind, and their sum for each of ``numel`` parameters.

    ``thread_scratch`` is of all threads of this process. Copies of states are states,
    too.
    """
    found = Counter(thread_scratch=thread_scratch_bytes(), receives=receives_bytes)
    for message in messages:
        found += kept_bytes(message.state, message.member)
        found["messages"] += message.buffer.size_bytes
        found["state"] += message.backup.size_bytes
    total = sum(found.values())
    return {
        **{kind: found[kind] for kind in KINDS},
        "bytes_a_parameter": total / max(1, numel),
    }


class Log:
    """Figures of the steps since the last row, on this rank alone.

    Nothing is communicated.

    ``to`` has ``add_scalar(name, value, step)``, ``log(row)`` or
    ``log_metrics(row, step)``. Or it makes a gauge of a name by ``create_gauge`` or
    ``labels``, or is a function of the step and a row. It is looked at in this order.
    Raises ``InvalidSetting`` for anything else.
    """

    def __init__(self, to: Any, every: int, recorder: Recorder) -> None:
        check_whole("every", every, "leave it out for 100")
        self.to = to
        self._write = _writer(to)
        self._every = every
        self._recorder = recorder
        self._snapshot = recorder.snapshot()

    def is_due(self, step: int) -> bool:
        """Whether a row is written at the end of this step."""
        return (step + 1) % self._every == 0

    def goes_on(self, step: int, messages: Sequence[Message]) -> bool:
        """Writes a row after ``step`` steps if it is due; returns whether that went.

        ``messages`` noted norms in the last of them.
        """
        if step % self._every:
            return True
        row = self._recorder.since(self._snapshot)
        del row["steps"]
        owed = []
        norms = []
        for message in messages:
            kept = residuals(message.state)
            owed += [float(part.norm()) for part in kept.values()]
            norms += message.norms if kept else []
        # where the first runs away from the second, what is kept does not get through
        if owed:
            row["residual_norm"] = math.hypot(*owed)
            row["gradient_norm"] = math.hypot(*norms)
        self._snapshot = self._recorder.snapshot()
        named = {
            f"{_PREFIX}{key}": value for key, value in row.items() if value is not None
        }
        try:
            self._write(step, named)
        # a full disk, or a lost connection, ends no training
        except Exception as error:
            log.warning(
                "logging ends, because step %d could not be logged: %r", step, error
            )
            return False
        return True


def _writer(to: Any) -> Callable[[int, dict[str, float]], object]:
    scalar: Any = getattr(to, "add_scalar", None)
    log: Any = getattr(to, "log", None)
    rows: Any = getattr(to, "log_metrics", None)
    gauge: Any = getattr(to, "create_gauge", getattr(to, "labels", None))
    if _takes(scalar, "", 0.0, 0):
        return lambda step, row: [
            scalar(name, value, step) for name, value in row.items()
        ]
    if _takes(log, {}):
        # Not wandb's step=, of which the user's own rows may be ahead: wandb drops what
        # is late.
        return lambda step, row: log({**row, f"{_PREFIX}step": step})
    # a Trainer's log_metrics is another method, and it has a log
    if _takes(rows, {}, 0):
        return lambda step, row: rows(row, step)
    if _takes(gauge, ""):
        of = cache(gauge)  # OpenTelemetry warns of a second gauge of one name
        return lambda step, row: [of(name).set(value) for name, value in row.items()]
    if _takes(to, 0, {}):
        return to  # type: ignore[no-any-return]
    raise invalid(
        "the first argument of log_to",
        to,
        "a SummaryWriter, a wandb run, an OpenTelemetry meter, a Prometheus gauge with "
        "one label, a Lightning logger, an Accelerator, or a function of a step and a "
        "dict of figures",
        "pass one of these, or None",
    )


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
