"""measure_codecs: seconds of encode, decode and merge over sizes, for every compressor.

Source: HiPress, section 3.2: T_enc(m) and T_dec(m), lines over the size, from a profile
    on the device at hand.
Differences from the paper: encode includes error feedback where the compressor's traits
    ask for it, as it then writes the residual in the same pass; merge (decode and add)
    has a line of its own. An algorithm that is an exchange of its own computes between
    its verbs for the network: what it calls encode, merge and decode is timed on one
    rank, and all ranks run in this process. Where it does one of them several times a
    step, the line is that of one of them: so many of them take what all took together.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..collective.allreduce import payload_buffer
from ..contract import Compressor, Exchange, Member
from ..contract.registry import load, names
from ..contract.spec import TensorSpec, squarest
from ..contract.verbs import Compute, Steps, rewritten
from ..errors import invalid
from ..exchange.local import drive
from ..planning.data.cluster import PRIMITIVES, CodecFit, Primitive
from ..planning.data.fit import LineFit, fit_line
from .layers import no_progress

SIZES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
"""Elements of float32: from a bias to the largest layers, in and out of the caches."""

BUDGET_S = 0.15
"""Seconds that one size of one compressor may take, about."""

ROUNDS = 7


def measure_codecs(
    compressors: Sequence[str] | None = None,
    *,
    world: int = 2,
    sizes: Sequence[int] = SIZES,
    budget_s: float = BUDGET_S,
    advance: Callable[..., None] = no_progress,
) -> dict[str, CodecFit]:
    """Measures compressors of these names (None: all) with their default settings.

    Times are medians over rounds of repeats on one float32 gradient, with torch's
    current number of threads. Buffers are reused, as in the runtime. Within a round
    they are means: ranks that share cores and measure at the same time then find what
    it costs them together. ``world`` is the number of ranks that a compressor may
    depend on; ``advance(amount, note)`` is told of progress, 1 for a size. Raises
    ``UnknownName`` for a compressor there is not, ``InvalidSetting`` for fewer than
    three sizes.
    """
    if len(set(sizes)) < 3 or min(sizes) < 1:
        raise invalid(
            "sizes", sizes, "three numbers of elements or more", "leave them out"
        )
    wanted = names("compress") if compressors is None else compressors
    chosen = {name: load("compress", name)() for name in wanted}
    fits = {}
    for name, codec in chosen.items():
        timed = _Codec if isinstance(codec, Compressor) else _Text
        cases = [timed(codec, numel, world) for numel in sizes]
        rounds = _rounds(cases, budget_s, partial(advance, note=name))
        fits[name] = CodecFit(**{key: _fit(key, cases, rounds) for key in PRIMITIVES})
    return fits


def _fit(
    primitive: Primitive,
    cases: Sequence[_Case],
    rounds: Sequence[Sequence[dict[Primitive, float]]],
) -> LineFit:
    """The line of one computation of this name, of their mean number of elements."""
    samples = []
    for case, turns in zip(cases, rounds, strict=True):
        numels = case.numels[primitive]
        if not numels:  # an exchange that never does it
            return LineFit(alpha_s=0.0, per_unit_s=0.0)
        together_s = statistics.median(turn[primitive] for turn in turns)
        samples.append((round(statistics.fmean(numels)), together_s / len(numels)))
    return fit_line(samples)


def _drawn(numel: int) -> Tensor:
    """A small gradient of float32, whatever the default is.

    The same in every process.
    """
    random = torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=random, dtype=torch.float32) * 1e-3


class _Case(ABC):
    """The steps of all ranks for one size; the computations of the first rank are
    timed.

    ``numels`` are the elements of each computation of the last turn, by its name.
    """

    numels: dict[Primitive, list[int]]

    @abstractmethod
    def all_steps(self) -> list[Steps[Any]]:
        """The steps of a turn, for each rank.

        Values start afresh, so that none fades away.
        """

    def turn_s(self) -> dict[Primitive, float]:
        """Seconds of each primitive, once or more often."""
        self.numels = {key: [] for key in PRIMITIVES}
        seconds: dict[Primitive, float] = dict.fromkeys(PRIMITIVES, 0.0)
        first, *others = self.all_steps()
        drive([self._clocked(first, seconds), *others])
        return seconds

    def _clocked(
        self, steps: Steps[Any], seconds: dict[Primitive, float]
    ) -> Steps[Any]:
        """The same steps.

        Its computations book their seconds when they are carried out.
        """

        def each(asked: Any) -> Steps[Any]:
            verbs = asked if isinstance(asked, tuple) else (asked,)
            clocked = tuple(
                replace(verb, fn=partial(self._timed, verb, seconds))
                if isinstance(verb, Compute)
                else verb
                for verb in verbs
            )
            return (yield clocked if isinstance(asked, tuple) else clocked[0])

        return rewritten(steps, each)

    def _timed(self, verb: Compute, seconds: dict[Primitive, float]) -> Any:
        """Carries out a computation and books its seconds."""
        start_s = time.perf_counter()
        result = verb.fn()
        taken_s = time.perf_counter() - start_s
        key = cast(Primitive, verb.name)
        if key in PRIMITIVES:
            seconds[key] += taken_s
            self.numels[key].append(verb.numel)
        return result


class _Codec(_Case):
    """One compressor on one gradient, with the buffers the runtime would keep."""

    def __init__(self, codec: Compressor, numel: int, world: int) -> None:
        spec = TensorSpec("measured", numel)
        self.codec = codec.for_world(world)
        self.scale = 1 / world
        self.state = self.codec.init(spec)
        self.source_N = _drawn(numel)
        self.grad_N = self.source_N.clone()
        self.sum_N = torch.zeros_like(self.source_N)
        traits = codec.traits
        self.residual_N = (
            torch.zeros_like(self.source_N) if traits.error_feedback else None
        )
        if traits.additive:  # then the payload may lie in the gradient itself
            self.buffer = payload_buffer(
                self.codec, Member(0, world), spec, self.grad_N
            )
        else:
            self.buffer = torch.zeros(
                self.codec.format(spec).size_bytes, dtype=torch.uint8
            )

    def all_steps(self) -> list[Steps[Any]]:
        self.grad_N.copy_(self.source_N)
        self.sum_N.zero_()
        return [self._steps()]

    def _steps(self) -> Steps[None]:
        codec = self.codec
        grad_N = self.grad_N
        numel = self.grad_N.numel()
        kept: dict[str, Any] = {"residual_N": self.residual_N, "buffer": self.buffer}
        encode = partial(codec.encode, self.state, grad_N, **kept)
        payload, self.state = yield Compute("encode", encode, numel)
        for name, fn, out_N in (
            ("merge", codec.merge, self.sum_N),
            ("decode", codec.decode, grad_N),
        ):
            yield Compute(name, partial(fn, payload, out_N, scale=self.scale), numel)


class _Text(_Case):
    """An exchange of its own on one square matrix, on all ranks, with error feedback.

    Every turn is the first step, in which rank 0 leads where ranks take turns: the
    others wait for what the leader computes.
    """

    def __init__(self, exchange: Exchange, numel: int, world: int) -> None:
        spec = TensorSpec("measured", numel, shapes=squarest(numel))
        self.exchange = exchange
        self.source_N = _drawn(numel)
        self.members = [Member(rank, world) for rank in range(world)]
        self.states = [exchange.init(spec, world) for _ in self.members]
        self.grads, self.residuals = (
            [self.source_N.clone() for _ in self.members] for _ in range(2)
        )

    def all_steps(self) -> list[Steps[Any]]:
        for grad_N, residual_N in zip(self.grads, self.residuals, strict=True):
            grad_N.copy_(self.source_N)
            residual_N.zero_()
        ranks = zip(self.members, self.states, self.grads, self.residuals, strict=True)
        return [
            self.exchange.synchronise(me, state, grad_N, grad_N, residual_N)
            for me, state, grad_N, residual_N in ranks
        ]


def _rounds(
    codecs: Sequence[_Case], budget_s: float, advance: Callable[[float], None]
) -> list[list[dict[Primitive, float]]]:
    """Mean seconds of a turn of each codec in each round.

    A round goes through all sizes.

    What else happens on the machine for a while then falls on all sizes and out of
    every median.
    """
    per_round = []
    for codec in codecs:
        codec.turn_s()  # compiles kernels and touches fresh pages
        per_round.append(
            max(1, round(budget_s / ROUNDS / sum(codec.turn_s().values())))
        )
    rounds: list[list[dict[Primitive, float]]] = [[] for _ in codecs]
    for _ in range(ROUNDS):
        for codec, count, of_codec in zip(codecs, per_round, rounds, strict=True):
            turns = [codec.turn_s() for _ in range(count)]
            of_codec.append(
                {
                    key: statistics.fmean(turn[key] for turn in turns)
                    for key in PRIMITIVES
                }
            )
            advance(1 / ROUNDS)
    return rounds
