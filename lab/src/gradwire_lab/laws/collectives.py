"""The laws of collectives: each takes an exchange (a collective with a codec) and a
case.

Those of ``OF_ANY`` ask nothing of a codec, and hold for algorithms that are exchanges
themselves.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.contract import Exchange, Member, State
from gradwire.contract.verbs import AllToAll, Compute, Steps, Verb, rewritten
from gradwire.errors import Deadlock, InvalidSetting
from gradwire.exchange.by_name import steps_of_all
from gradwire.exchange.local import Outcome, drive
from gradwire.exchange.pair import Pair
from gradwire.exchange.without_data import wire_bytes

from ..errors import LawBroken
from .cases import Case, stepped, thinned
from .tolerance import (
    all_same_bits,
    assert_near,
    is_finite,
    largest,
    laws_in,
    must,
    same_bits,
)


def _driven(
    exchange: Exchange,
    grads: list[Tensor],
    seed: int,
    states: list[State] | None = None,
) -> Outcome[Any]:
    made = steps_of_all(exchange, grads, states)
    return drive(made, seed=seed, ranks_per_host=exchange.ranks_per_host)


def _means(
    exchange: Exchange,
    grads: list[Tensor],
    seed: int,
    states: list[State] | None = None,
) -> list[Tensor]:
    return [mean_N for mean_N, _, _ in _driven(exchange, grads, seed, states).results]


def _means_of(exchange: Exchange, case: Case, seed: int) -> list[Tensor]:
    return _means(exchange, case.grads(), seed, case.states(exchange))


def _is_exact(exchange: Exchange, case: Case) -> bool:
    return wire_bytes(exchange, case.spec, case.world) is not None


def law_never_deadlocks(exchange: Exchange, case: Case) -> None:
    """No interleaving of ranks deadlocks, not even where a send waits for its receiver.

    To do: yield a send and its receive together, as the tuple (Send(...), Recv(...)),
    or order them by rank.
    """
    for seed in range(3):
        try:
            _driven(exchange, case.grads(), seed, case.states(exchange))
        except Deadlock as error:
            raise LawBroken(str(error)) from error


def law_equals_the_dense_mean(exchange: Pair, case: Case) -> bool:
    """The mean through a lossless codec is that of DDP, to one rounding a rank.

    To do: merge every rank's payload once, and divide by the number of ranks once.
    """
    if not exchange.codec.traits.lossless:
        return False
    grads = case.grads()
    want_N = torch.stack([g.double() for g in grads]).mean(0)
    for mean_N in _means(exchange, grads, case.seed):
        must(mean_N.dtype == case.dtype, f"the mean is {mean_N.dtype}")
        assert_near(
            mean_N,
            want_N,
            case.dtype,
            magnitude=largest(*grads),
            terms=case.world,
            what="the mean",
        )
    return True


def law_same_bits_on_every_rank(exchange: Exchange, case: Case) -> None:
    """The mean has the same bits on every rank.

    To do: merge in one order everywhere (ranks ascending), or merge in one place and
    send the result on unchanged; decode also what this rank encoded itself.
    """
    means = _means_of(exchange, case, case.seed)
    for rank, mean_N in enumerate(means):
        must(same_bits(mean_N, means[0]), f"rank {rank} has other bits than rank 0")


def law_sends_the_stated_bytes(exchange: Exchange, case: Case) -> None:
    """Each rank sends the bytes that a run without data says.

    Where sizes vary with values none are stated, and a pair says so.

    To do: let sizes of what is sent follow from the spec alone, or declare
    exact_size=False.
    """
    sent = _driven(exchange, case.grads(), case.seed, case.states(exchange)).sent_bytes
    stated = wire_bytes(exchange, case.spec, case.world)
    if stated is not None:
        must(sent == stated, f"states {stated} bytes a rank, sends {sent}")


def law_any_interleaving_same_bits(exchange: Exchange, case: Case) -> None:
    """The result does not depend on which rank runs first.

    To do: merge by rank and never by arrival, and keep nothing that ranks share outside
    of the verbs.
    """
    first, *others = (_means_of(exchange, case, seed) for seed in range(3))
    for means in others:
        must(all_same_bits(first, means), "the result depends on which rank runs first")


def law_verbs_do_not_depend_on_values(exchange: Exchange, case: Case) -> None:
    """Ordinary gradients, zeros, NaN and zeros on one rank take the same verbs in the
    same order.

    And whatever sizes depend on, all ranks know.

    To do: yield the same verbs whatever the gradient holds; if a size follows from
    values, tell it to all ranks first by a verb of a fixed size.
    """
    ordinary = case.grads()
    zeros = [torch.zeros_like(g) for g in ordinary]
    nans = [torch.full_like(g, float("nan")) for g in ordinary]
    want = _verbs(exchange, case, ordinary)
    for other in (zeros, nans, [*zeros[:1], *ordinary[1:]]):
        got = _verbs(exchange, case, other)
        must(got == want, f"with other values other verbs: {got} is not {want}")


def law_mean_may_overwrite_the_gradient(exchange: Exchange, case: Case) -> None:
    """``synchronise`` with ``out_N`` being ``grad_N`` leaves the bits that another
    buffer gets.

    To do: read all of grad_N before out_N is written.
    """
    want = _means_of(exchange, case, case.seed)
    grads = case.grads()
    members = [Member(rank, case.world) for rank in range(case.world)]
    stepped(exchange, members, case.states(exchange), grads, case.seed)
    for rank, (grad_N, want_N) in enumerate(zip(grads, want, strict=True)):
        must(same_bits(grad_N, want_N), f"in place rank {rank} gets another mean")


class Undefined(Member):
    """A member whose buffers hold NaN (-1 in integers) whenever they are asked for."""

    __slots__ = ()

    def scratch(self, *args: Any, **kwargs: Any) -> Tensor:
        return _spoilt(super().scratch(*args, **kwargs))

    def thread_scratch(self, *args: Any) -> Tensor:
        return _spoilt(super().thread_scratch(*args))


def _spoilt(buffer: Tensor) -> Tensor:
    buffer.view(torch.uint8).fill_(255)
    return buffer


def law_used_buffers_change_nothing(exchange: Exchange, case: Case) -> None:
    """Steps of many, few, no and many non-zero elements have the bits that new buffers
    give.

    One rank has no element in any of them. Buffers are kept from step to step, and hold
    NaN each time they are asked for.

    To do: write every element of what me.scratch(...) gives before it is read. Who
    needs what a
    buffer holds keeps the tensor: asked for again, its name may stand for other memory.
    """
    members = [Undefined(rank, case.world) for rank in range(case.world)]
    for step, every in enumerate((1, 16, 0, 1)):
        first, *others = case.grads(step)
        grads = [thinned(first, 0), *(thinned(grad_N, every) for grad_N in others)]
        want = _means(exchange, grads, case.seed, case.states(exchange))
        stepped(exchange, members, case.states(exchange), grads, case.seed)
        must(
            all_same_bits(grads, want),
            f"step {step}: what the buffers held before shows in the mean",
        )


def law_gradient_untouched(exchange: Exchange, case: Case) -> None:
    """The gradient is not written where the mean has a buffer of its own.

    To do: work on a copy or in a buffer of me.scratch(...).
    """
    grads = case.grads()
    _means(exchange, grads, case.seed, case.states(exchange))
    for rank, (now_N, before_N) in enumerate(zip(grads, case.grads(), strict=True)):
        must(same_bits(now_N, before_N), f"the gradient of rank {rank} was written")


def law_sums_do_not_overflow(exchange: Pair, case: Case) -> bool:
    """16-bit gradients near the end of their range have a finite mean, as under DDP.

    Not said of codecs that round one gradient alone beyond that range, or may, at
    random.

    To do: sum in working_dtype(grad_N.dtype), or divide by the number of ranks before
    the sum.
    """
    codec = exchange.codec
    if codec.traits.unbiased and not codec.traits.lossless:
        return False
    for dtype in (torch.float16, torch.bfloat16):
        grads = [torch.full((case.numel,), 6e4, dtype=dtype) for _ in range(case.world)]
        alone, _ = codec.encode(codec.init(case.spec), grads[0])
        if not is_finite(codec.decode(alone, torch.empty_like(grads[0]))):
            continue
        for rank, mean_N in enumerate(_means(exchange, grads, case.seed)):
            must(is_finite(mean_N), f"rank {rank}: a sum of {dtype} overflowed")
    return True


def _verbs(exchange: Exchange, case: Case, grads: list[Tensor]) -> list[list[Any]]:
    """The verbs that each rank yields, one list a rank; sizes only where they may not
    vary.
    """
    exact = _is_exact(exchange, case)
    logs: list[list[Any]] = [[] for _ in grads]
    own_steps = steps_of_all(exchange, grads, case.states(exchange))
    steps = [
        _recorded(steps, log, exact) for steps, log in zip(own_steps, logs, strict=True)
    ]
    try:
        drive(steps, seed=case.seed, ranks_per_host=exchange.ranks_per_host)
    except (Deadlock, InvalidSetting, LawBroken) as error:
        raise LawBroken(
            f"ranks with other values called other verbs: {error}"
        ) from error
    return logs


def _recorded(steps: Steps[Any], log: list[Any], exact: bool) -> Steps[Any]:
    """The same steps; notes what they yield."""

    def each(asked: Any) -> Steps[Any]:
        verbs = asked if isinstance(asked, tuple) else (asked,)
        log.append(tuple(_sketch(verb, exact) for verb in verbs))
        return (yield asked)

    return rewritten(steps, each)


def _sketch(verb: Verb, exact: bool) -> tuple[Any, ...]:
    """A verb without the content of its buffers."""
    kind = type(verb).__name__
    if isinstance(verb, Compute):
        return (kind, verb.name, verb.numel if exact else None)
    peer = getattr(verb, "dst", getattr(verb, "src", None))
    parts = None
    if isinstance(verb, AllToAll) and exact:
        parts = (verb.out_sizes, verb.in_sizes)
    return (kind, peer, verb.buf.dtype, verb.buf.numel() if exact else None, parts)


OF_ANY: tuple[Callable[[Exchange, Case], None], ...] = (
    law_never_deadlocks,
    law_same_bits_on_every_rank,
    law_sends_the_stated_bytes,
    law_any_interleaving_same_bits,
    law_verbs_do_not_depend_on_values,
    law_mean_may_overwrite_the_gradient,
    law_used_buffers_change_nothing,
    law_gradient_untouched,
)

LAWS = laws_in(globals())
