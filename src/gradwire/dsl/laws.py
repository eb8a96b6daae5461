"""What every program has to keep, checked on a panel of awkward gradients.

For authors: ``check(codec)`` tells in seconds what the laws of the test suite tell about shipped
compressors. A law looks at one gradient and says what is wrong, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contract import Traits
from ..kernels.compiler import reference_only
from ..payload import Payload
from ..spec import TensorSpec

Program = Any
"""To a type checker a program may be anything: see program.py."""

NUM_DRAWS = 400
_SIZES = (0, 1, 63, 64, 65, 300)
_ROUNDING = 1e-5  # of the largest magnitude: sums and scales are float32
_FLOAT32 = torch.finfo(torch.float32)
_ROUNDINGS = 4  # of the sum, the residual and what is added up here


@dataclass(frozen=True)
class Verdict:
    """How one law went: ``wrong`` is empty where it holds."""

    law: str
    wrong: str = ""
    applies: bool = True

    @property
    def word(self) -> str:
        return ("broken" if self.wrong else "holds") if self.applies else "not declared"


def check(codec: Program) -> Iterator[Verdict]:
    """The verdict of each law, in turn; one that holds has seen the whole panel."""
    gradients = panel(codec.block)
    for name, (applies, law) in LAWS.items():
        if not applies(codec.traits):
            yield Verdict(name, applies=False)
            continue
        found = ((law(codec, grad_N), kind, grad_N) for kind, grad_N in gradients)
        wrong = next((f"{w} ({g.numel()} elements, {kind})" for w, kind, g in found if w), "")
        yield Verdict(name, wrong)


def panel(block: int) -> list[tuple[str, Tensor]]:
    """Gradients by kind: empty, around a group of 64 and around a block; also what is not finite.

    >>> sorted({kind for kind, _ in panel(64)})[:3]
    ['equal', 'inf', 'nan']
    """
    made = []
    sizes = sorted({*_SIZES, min(block, 20_000) + 1})
    for number, numel in enumerate(sizes):
        normal_N = torch.randn(numel, generator=torch.Generator().manual_seed(number))
        made += [
            ("normal", normal_N),
            ("zeros", torch.zeros(numel)),
            ("equal", torch.full((numel,), -1.5)),
            ("tiny", normal_N * 1e-30),
            ("wide", normal_N * 10.0 ** torch.arange(-6, 4).repeat(numel // 10 + 1)[:numel]),
        ]
        for kind in ("nan", "inf"):
            spoiled_N = normal_N.clone()
            spoiled_N[numel // 2 : numel // 2 + 1] = float(kind)
            made.append((kind, spoiled_N))
    return made


# ---- the laws ----------------------------------------------------------------------------------


def bytes_as_stated(codec: Program, grad_N: Tensor) -> str:
    """A payload is as long as ``format`` says, or not longer where sizes vary."""
    stated = codec.format(_spec(grad_N)).size_bytes
    real = _encoded(codec, grad_N).size_bytes
    right = real == stated if codec.traits.exact_size else real <= stated
    return "" if right else f"format says {stated} bytes, the payload has {real}"


def same_bytes_again(codec: Program, grad_N: Tensor) -> str:
    """One gradient and one state give one payload."""
    once, again = _encoded(codec, grad_N), _encoded(codec, grad_N)
    return "" if torch.equal(_bits(once), _bits(again)) else "two encodings differ"


def compiled_as_interpreted(codec: Program, grad_N: Tensor) -> str:
    """C++ gives the interpreter's bits: payload, residual and what is decoded."""
    ours = _outcome(codec, grad_N)
    with reference_only():
        theirs = _outcome(codec, grad_N)
    for name, value in ours.items():
        if not torch.equal(value, theirs[name]):
            return f"C++ and the interpreter give another {name}"
    return ""


def residual_is_what_is_missing(codec: Program, grad_N: Tensor) -> str:
    """What was sent plus the new residual is gradient plus old residual."""
    if not _tame(grad_N):
        return ""
    residual_N = 0.25 * grad_N.flip(0)
    whole_N = grad_N + residual_N
    sent_N = _decoded(codec, _encoded(codec, grad_N, residual_N), grad_N)
    return _near(sent_N + residual_N, whole_N, sent_N, "sent plus residual is off")


def residual_stays_finite(codec: Program, grad_N: Tensor) -> str:
    """An inf or NaN is sent and never kept."""
    residual_N = torch.ones_like(grad_N)
    _encoded(codec, grad_N, residual_N)
    return "" if bool(residual_N.isfinite().all()) else "an inf or NaN entered the residual"


def not_finite_is_visible(codec: Program, grad_N: Tensor) -> str:
    """An inf or NaN can be seen after decode, and nothing else looks like one."""
    finite = bool(_decoded(codec, _encoded(codec, grad_N), grad_N).isfinite().all())
    if bool(grad_N.isfinite().all()) == finite:
        return ""
    return "finite numbers decode to inf or NaN" if not finite else "an inf or NaN is lost"


def merge_adds_what_decode_gives(codec: Program, grad_N: Tensor) -> str:
    """merge(payload, sum, scale) adds scale times the decoded gradient."""
    if not _tame(grad_N):
        return ""
    payload, sum_N = _encoded(codec, grad_N), grad_N.flip(0).contiguous()
    sent_N = 0.25 * _decoded(codec, payload, grad_N)
    want_N = sum_N + sent_N
    codec.merge(payload, sum_N, scale=0.25)
    return _near(sum_N, want_N, sent_N, "merge is off")


def contracts(codec: Program, grad_N: Tensor) -> str:
    """||x - decode(encode(x))|| <= ||x||."""
    if not _tame(grad_N):
        return ""
    decoded_N = _decoded(codec, _encoded(codec, grad_N), grad_N)
    left, whole = float((grad_N - decoded_N).double().norm()), float(grad_N.double().norm())
    return "" if left <= whole * (1 + 1e-6) else f"{left:.6g} is lost of a norm of {whole:.6g}"


def is_unbiased(codec: Program, grad_N: Tensor) -> str:
    """The mean over many steps comes as near as its spread makes likely.

    The empirical Bernstein bound (Maurer and Pontil, COLT 2009, theorem 4) at odds of 3e-8: what is
    sent in few steps may be sent in none of these, and shows no spread then.
    """
    if not _tame(grad_N) or grad_N.numel() not in (65, 300):
        return ""
    state, off_SN = codec.init(_spec(grad_N)), torch.empty(NUM_DRAWS, grad_N.numel())
    for step in range(NUM_DRAWS):
        payload, state = codec.encode(state, grad_N)
        off_SN[step] = _decoded(codec, payload, grad_N) - grad_N
    moved = float((off_SN.amax(0) - off_SN.amin(0)).max())
    range_ = moved or 2 * float((grad_N + off_SN).abs().max())
    rounding = _ROUNDING * float(grad_N.abs().max())
    allowed_N = 6 * off_SN.std(0) / NUM_DRAWS**0.5 + 42 / NUM_DRAWS * range_ + rounding
    excess_N = off_SN.mean(0).abs() - allowed_N
    worst = int(excess_N.argmax())
    if float(excess_N[worst]) <= 0:
        return ""
    mean = float(grad_N[worst] + off_SN[:, worst].mean())
    return f"{float(grad_N[worst]):.4g} decodes to {mean:.4g} on average"


Law = Callable[[Program, Tensor], str]


def _always(traits: Traits) -> bool:
    return True


LAWS: dict[str, tuple[Callable[[Traits], bool], Law]] = {
    **{
        law.__name__: (_always, law)
        for law in (
            bytes_as_stated,
            same_bytes_again,
            compiled_as_interpreted,
            residual_is_what_is_missing,
            residual_stays_finite,
            not_finite_is_visible,
            merge_adds_what_decode_gives,
        )
    },
    "contracts": (lambda traits: traits.contraction, contracts),
    "is_unbiased": (lambda traits: traits.unbiased, is_unbiased),
}
"""Each law and whether a program with given traits has to keep it."""


def _spec(grad_N: Tensor) -> TensorSpec:
    return TensorSpec("gradient", grad_N.numel())


def _encoded(codec: Program, grad_N: Tensor, residual_N: Tensor | None = None) -> Payload:
    payload, _ = codec.encode(codec.init(_spec(grad_N)), grad_N, residual_N=residual_N)
    assert isinstance(payload, Payload)
    return payload


def _decoded(codec: Program, payload: Payload, grad_N: Tensor) -> Tensor:
    out_N: Tensor = codec.decode(payload, torch.empty_like(grad_N))
    return out_N


def _outcome(codec: Program, grad_N: Tensor) -> dict[str, Tensor]:
    residual_N = torch.ones_like(grad_N)
    payload = _encoded(codec, grad_N, residual_N)
    decoded_N = _decoded(codec, payload, grad_N).nan_to_num(nan=1e38)  # signs of NaN differ
    return {
        "payload": _bits(payload),
        "residual": residual_N.view(torch.int32),
        "decoded gradient": decoded_N.view(torch.int32),
    }


def _bits(payload: Payload) -> Tensor:
    assert payload.buffer is not None
    return payload.buffer


def _tame(grad_N: Tensor) -> bool:
    return bool(grad_N.isfinite().all())


def _near(got_N: Tensor, want_N: Tensor, sent_N: Tensor, what: str) -> str:
    """Whether both agree to a few roundings, of what is wanted or of what was sent.

    That may be far larger: of signs times 1 and gradients of 1e-30 nothing else is left.
    """
    if not got_N.numel():
        return ""
    off = float((got_N.double() - want_N.double()).abs().max())
    magnitude = max(float(want_N.abs().max()), float(sent_N.abs().max()), _FLOAT32.tiny)
    is_near = off <= _ROUNDINGS * _FLOAT32.eps * magnitude < math.inf
    return "" if is_near else f"{what} by {off:.4g}"
