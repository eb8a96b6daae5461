"""Batch compression (section 3.2 of HiPress): encodes that wait are joined, or not.

HiPress encodes the gradients that wait in its queue by one call. Here gradients that
share a message are encoded so. This figure says what joining encodes of several
messages as well would save. Each tensor is a message of its own, which is the best
case. Encodes take the seconds that are measured here, and arrive as a backward pass
makes the gradients. A call takes one of them, or all that wait.
"""

from __future__ import annotations

import timeit
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from gradwire.compress.onebit import onebit
from gradwire.contract import Compressor
from gradwire.contract.spec import TensorSpec
from gradwire.planning.data.fit import LineFit
from gradwire_lab.planning.sparse_fusion import arrivals

from ..frame import Ask, Claim, Findings, Row
from .setting import LOCAL

MODELS = ("resnet50", "bert_base", "ugatit")
SIZES = (64, 2**20)
"""Elements of which a call, and an element, are measured."""
REPEATS = 100
SLOWDOWNS = (1.0, 20.0)
"""Times the seconds of a GPU's backward pass: a GPU's, and those of a slow host."""
LEAST = 0.01
"""A share of the time that is worth a queue of encodes."""


def batch(ask: Ask) -> Findings:
    """Calls, and seconds until the last gradient is encoded; quick: one model."""
    line = measured_line()
    rows = [
        row_of(model, slowdown, line)
        for model in (MODELS[:1] if ask.quick else MODELS)
        for slowdown in SLOWDOWNS
    ]
    note = (
        f"onebit on this CPU: {line.alpha_s * 1e6:.3g} us for a call and "
        f"{line.per_unit_s * 1e9:.3g} ns for an element"
    )
    return Findings(tuple(rows), tuple(claims_of(rows)), (note,))


def measured_line() -> LineFit:
    """The seconds of an encode with error feedback: the least of many, as cores may be
    shared.
    """
    codec: Compressor = onebit()
    least_s = []
    for numel in SIZES:
        grad_N = torch.randn(numel)
        residual_N = torch.zeros(numel)
        buffer = torch.zeros(codec.format(TensorSpec("", numel)).size_bytes).byte()
        encode = partial(
            codec.encode, None, grad_N, residual_N=residual_N, buffer=buffer
        )
        least_s.append(min(timeit.repeat(encode, number=1, repeat=REPEATS)))
    per_unit_s = (least_s[1] - least_s[0]) / (SIZES[1] - SIZES[0])
    return LineFit(alpha_s=least_s[0], per_unit_s=per_unit_s)


def row_of(model: str, slowdown: float, line: LineFit) -> Row:
    """Both ways for a model whose backward pass takes ``slowdown`` times as long."""
    profile = LOCAL.profile(model)
    gaps = arrivals(profile)
    times_s = accumulate(slowdown * waited_s for _, waited_s in gaps)
    ready = [(at_s, one.numel) for at_s, (one, _) in zip(times_s, gaps, strict=True)]
    alone = encoded(ready, line, joins=False)
    joined = encoded(ready, line, joins=True)
    return {
        "name": f"{model}, backward {slowdown * profile.backward_s:.2g} s",
        "calls_alone": alone[0],
        "calls_joined": joined[0],
        "end_alone_s": alone[1],
        "end_joined_s": joined[1],
    }


def encoded(
    ready: Sequence[tuple[float, int]], line: LineFit, *, joins: bool
) -> tuple[int, float]:
    """The calls of one lane, and the end of the last.

    ``ready`` has the time and the elements of each gradient, by time. If it ``joins``,
    a call takes all gradients that wait.

    >>> line = LineFit(alpha_s=1.0, per_unit_s=0.0)
    >>> three = [(0.0, 1), (0.5, 1), (0.75, 1)]
    >>> encoded(three, line, joins=False), encoded(three, line, joins=True)
    ((3, 3.0), (2, 2.0))
    """
    now_s = 0.0
    calls = 0
    left = [*ready]
    while left:
        now_s = max(now_s, left[0][0])
        waiting = [one for one in left if one[0] <= now_s] if joins else left[:1]
        del left[: len(waiting)]
        now_s += line.seconds(sum(numel for _, numel in waiting))
        calls += 1
    return calls, now_s


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    """Whether joining saves a hundredth of the time until the last encode ends."""
    shares = [
        1 - float(str(row["end_joined_s"])) / float(str(row["end_alone_s"]))
        for row in rows
    ]
    pays = min(shares) > LEAST
    shown = f"{100 * min(shares):.2g} to {100 * max(shares):.2g} % is saved"
    why = "" if pays else "few encodes wait at one time, and a call is short"
    what = "joining encodes of several messages ends them earlier, by 1 % or more"
    return [Claim(what, "section 3.2", shown, pays, why)]
