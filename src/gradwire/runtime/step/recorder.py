"""Recorder: the spans of the last steps and the running totals behind ``stats()``."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from ...contract.trace.density import StepDensity
from ...contract.trace.span import Span, Trace
from .engine import StepCounters


@dataclass
class DensityTotals:
    """Sums over all steps in which elements were selected."""

    numel: int = 0
    asked: float | None = 0.0
    selected: int = 0
    arrived: int = 0

    def add(self, density: StepDensity) -> None:
        """Adds the densities of one more step."""
        unknown = self.asked is None or density.asked is None
        self.asked = None if unknown else (self.asked or 0.0) + (density.asked or 0.0)
        self.numel += density.numel
        self.selected += density.selected
        self.arrived += density.arrived

    def since(self, before: DensityTotals) -> dict[str, float | None]:
        """The densities since ``before``; None where nothing was selected or none was set."""
        numel, known = self.numel - before.numel, self.asked is not None
        sums = {
            "asked": (self.asked or 0.0) - (before.asked or 0.0) if known else None,
            "local": self.selected - before.selected,
            "actual": self.arrived - before.arrived,
        }
        return {
            f"density_{name}": None if total is None or not numel else total / numel
            for name, total in sums.items()
        }


class RunTotals(NamedTuple):
    """The totals at the end of a step."""

    num_steps: int
    sent_bytes: int
    compute_s: float
    communication_s: float
    wait_s: float
    density: DensityTotals


class Recorder:
    """Keeps the spans of the last ``num_steps`` steps, and counters of all of them."""

    def __init__(self, num_steps: int) -> None:
        self._lock = threading.Lock()
        # One more than asked for: the last is the step that is going on.
        self._steps: deque[list[Span]] = deque([[]], maxlen=num_steps + 1)
        self._densities: deque[StepDensity | None] = deque(maxlen=num_steps)
        self._density = DensityTotals()
        self._step_s: deque[float] = deque(maxlen=1000)
        self._began_s: float | None = None
        self.num_steps = 0
        self.sent_bytes = 0
        self.compute_s = 0.0
        self.communication_s = 0.0
        self.wait_s = 0.0

    def add(self, span: Span) -> None:
        with self._lock:
            spans = self._steps[-1]
            if span.lane == "forward" and spans and spans[-1].lane == "forward":
                spans.pop()  # Evaluation between steps must not pile up.
            spans.append(span)

    def end_step(
        self, counters: StepCounters, now_s: float, density: StepDensity | None = None
    ) -> None:
        """Closes a step: adds its counters and opens a new list of spans."""
        with self._lock:
            self._densities.append(density)
            if density is not None:
                self._density.add(density)
            self.num_steps += 1
            self.sent_bytes += counters.sent_bytes
            self.compute_s += counters.compute_s
            self.communication_s += counters.communication_s
            self.wait_s += sum(s.end_s - s.start_s for s in self._steps[-1] if s.lane == "wait")
            if self._began_s is not None:
                self._step_s.append(now_s - self._began_s)
            self._began_s = now_s
            self._steps.append([])

    def forget_times(self) -> None:
        """Counts the times between steps anew, where steps become another thing."""
        with self._lock:
            self._step_s.clear()
            self._began_s = None

    def trace(self) -> Trace:
        with self._lock:
            spans = (span for spans in self._steps for span in spans)
            return Trace.of(spans, (found for found in self._densities if found is not None))

    def mark(self) -> RunTotals:
        """The totals so far, to count from."""
        with self._lock:
            return self._mark()

    def _mark(self) -> RunTotals:
        return RunTotals(
            self.num_steps,
            self.sent_bytes,
            self.compute_s,
            self.communication_s,
            self.wait_s,
            replace(self._density),
        )

    def since(self, mark: RunTotals) -> dict[str, float | None]:
        """Averages per step; ``step_s`` is the median time from one step's end to the next."""
        with self._lock:
            now, num_steps = self._mark(), self.num_steps - mark.num_steps
            last = list(self._step_s)[-num_steps:] if num_steps else []
        steps = max(1, num_steps)
        return {
            "steps": num_steps,
            "step_s": median(last) if last else 0.0,
            "wire_bytes_per_step": (now.sent_bytes - mark.sent_bytes) / steps,
            "compute_s_per_step": (now.compute_s - mark.compute_s) / steps,
            "communication_s_per_step": (now.communication_s - mark.communication_s) / steps,
            "wait_s_per_step": (now.wait_s - mark.wait_s) / steps,
            **now.density.since(mark.density),
        }

    def stats(self) -> dict[str, float | None]:
        """Averages over all steps, as of ``since``."""
        return self.since(_START)


_START = RunTotals(0, 0, 0.0, 0.0, 0.0, DensityTotals())
