"""The laws of collectives: each takes an exchange (a collective with a codec) and a case."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from gradwire.collective._local import Outcome, drive
from gradwire.collective._verbs import AllToAll, Compute, Steps, Verb
from gradwire.contract import Member
from gradwire.errors import Deadlock
from gradwire.exchange import Pair, synchronise, texts

from .cases import Case
from .tolerance import assert_near, largest, same_bits


def _driven(exchange: Pair, grads: list[Tensor], seed: int) -> Outcome[Any]:
    return drive(texts(exchange, grads), seed=seed)


def _means(exchange: Pair, grads: list[Tensor], seed: int) -> list[Tensor]:
    return [mean_N for mean_N, _, _ in _driven(exchange, grads, seed).results]


def law_never_deadlocks(exchange: Pair, case: Case) -> None:
    """Not even where a send waits for its receiver, as in the local driver."""
    for seed in range(3):
        try:
            _driven(exchange, case.grads(), seed)
        except Deadlock as error:
            raise AssertionError(str(error)) from error


def law_equals_the_dense_mean(exchange: Pair, case: Case) -> None:
    """For lossless codecs: what DDP computes, to one rounding a rank."""
    if not exchange.codec.traits.lossless:
        return
    grads = case.grads()
    want_N = torch.stack([g.double() for g in grads]).mean(0)
    for mean_N in _means(exchange, grads, case.seed):
        assert mean_N.dtype == case.dtype, f"the mean is {mean_N.dtype}"
        assert_near(
            mean_N, want_N, case.dtype, magnitude=largest(*grads), terms=case.world, what="the mean"
        )


def law_same_bits_on_every_rank(exchange: Pair, case: Case) -> None:
    means = _means(exchange, case.grads(), case.seed)
    for rank, mean_N in enumerate(means):
        assert same_bits(mean_N, means[0]), f"rank {rank} has other bits than rank 0"


def law_sends_the_stated_bytes(exchange: Pair, case: Case) -> None:
    """Exactly; where sizes vary none are stated, and the collective's formula is a bound."""
    sent = _driven(exchange, case.grads(), case.seed).sent_bytes
    stated = exchange.wire_bytes(case.spec, case.world)
    if exchange.codec.traits.exact_size:
        assert sent == stated, f"states {stated} bytes a rank, sends {sent}"
        return
    assert stated is None, f"states {stated} bytes a rank, and they vary"
    if case.world > 1:
        most = exchange.collective.wire_bytes(exchange.codec, case.spec, case.world)
        assert all(a <= b for a, b in zip(sent, most, strict=True)), (
            f"at most {most} bytes a rank, sends {sent}"
        )


def law_any_interleaving_same_bits(exchange: Pair, case: Case) -> None:
    grads = case.grads()
    first, *others = (_means(exchange, grads, seed) for seed in range(4))
    for means in others:
        assert all(same_bits(a, b) for a, b in zip(first, means, strict=True)), (
            "the result depends on which rank runs first"
        )


def law_verbs_do_not_depend_on_values(exchange: Pair, case: Case) -> None:
    """The same verbs in the same order for ordinary gradients, zeros, NaN, zeros on one rank."""
    ordinary = case.grads()
    zeros = [torch.zeros_like(g) for g in ordinary]
    nans = [torch.full_like(g, float("nan")) for g in ordinary]
    want = _verbs(exchange, ordinary, case.seed)
    for other in (zeros, nans, [*zeros[:1], *ordinary[1:]]):
        got = _verbs(exchange, other, case.seed)
        assert got == want, f"with other values other verbs: {got} is not {want}"


def law_mean_may_overwrite_the_gradient(exchange: Pair, case: Case) -> None:
    """``synchronise`` with ``out_N`` being ``grad_N`` leaves the bits that ``run`` returns."""
    want = _means(exchange, case.grads(), case.seed)
    grads = case.grads()
    steps = [
        synchronise(exchange, Member(r, case.world), exchange.init(case.spec, case.world), g, g)
        for r, g in enumerate(grads)
    ]
    drive(steps, seed=case.seed)
    for rank, (grad_N, want_N) in enumerate(zip(grads, want, strict=True)):
        assert same_bits(grad_N, want_N), f"in place rank {rank} gets another mean"


def law_used_buffers_change_nothing(exchange: Pair, case: Case) -> None:
    """A second step through the same members has the bits of a first one through new ones."""
    second = case.grads(step=1)
    want = _means(exchange, second, case.seed)
    members = [Member(rank, case.world) for rank in range(case.world)]
    for grads in (case.grads(), second):
        steps = [
            synchronise(exchange, me, exchange.init(case.spec, case.world), g, g)
            for me, g in zip(members, grads, strict=True)
        ]
        drive(steps, seed=case.seed)
    assert all(same_bits(a, b) for a, b in zip(second, want, strict=True)), (
        "what the buffers held from the step before shows in the mean"
    )


def law_gradient_untouched(exchange: Pair, case: Case) -> None:
    grads = case.grads()
    _means(exchange, grads, case.seed)
    for rank, (now_N, before_N) in enumerate(zip(grads, case.grads(), strict=True)):
        assert same_bits(now_N, before_N), f"run wrote the gradient of rank {rank}"


def law_sums_do_not_overflow(exchange: Pair, case: Case) -> None:
    """16-bit gradients near the end of their range have a finite mean, as under DDP.

    Not said of codecs that round one gradient alone beyond that range, or may, at random.
    """
    codec = exchange.codec
    if codec.traits.unbiased and not codec.traits.lossless:
        return
    for dtype in (torch.float16, torch.bfloat16):
        grads = [torch.full((case.numel,), 6e4, dtype=dtype) for _ in range(case.world)]
        alone, _ = codec.encode(codec.init(case.spec), grads[0])
        if not bool(codec.decode(alone, torch.empty_like(grads[0])).isfinite().all()):
            continue
        for rank, mean_N in enumerate(_means(exchange, grads, case.seed)):
            assert bool(mean_N.isfinite().all()), f"rank {rank}: a sum of {dtype} overflowed"


def _verbs(exchange: Pair, grads: list[Tensor], seed: int) -> list[list[Any]]:
    """What each rank yields, one list a rank; sizes only where they may not vary."""
    exact = exchange.codec.traits.exact_size
    logs: list[list[Any]] = [[] for _ in grads]
    steps = [_recorded(t, log, exact) for t, log in zip(texts(exchange, grads), logs, strict=True)]
    try:
        drive(steps, seed=seed)
    except Deadlock as error:
        raise AssertionError(f"ranks with other values called other verbs: {error}") from error
    return logs


def _recorded(text: Steps[Any], log: list[Any], exact: bool) -> Generator[Any, Any, Any]:
    """The same text; notes what it yields."""
    value = None
    while True:
        try:
            asked = text.send(value)
        except StopIteration as stop:
            return stop.value
        verbs = asked if isinstance(asked, tuple) else (asked,)
        log.append(tuple(_sketch(verb, exact) for verb in verbs))
        value = yield asked


def _sketch(verb: Verb, exact: bool) -> tuple[Any, ...]:
    """A verb without the content of its buffers."""
    kind = type(verb).__name__
    if isinstance(verb, Compute):
        return (kind, verb.name, verb.numel if exact else None)
    peer = getattr(verb, "dst", getattr(verb, "src", None))
    parts = (verb.out_sizes, verb.in_sizes) if isinstance(verb, AllToAll) and exact else None
    return (kind, peer, verb.buf.dtype, verb.buf.numel() if exact else None, parts)


LAWS = tuple(found for name, found in sorted(globals().items()) if name.startswith("law_"))
