"""The laws of compressors: each takes any compressor and any flat gradient.

A law asks a compressor's traits whether it applies, and returns False where it does
not. The residual that a law needs is made from the gradient's length, so that a failure
can be repeated.
"""

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.contract import Compressor
from gradwire.contract.spec import TensorSpec, working_dtype

from ..errors import LawBroken
from . import payloads
from .payloads import (
    content,
    decoded_of,
    decoding,
    encoded,
    residual_for,
    spec_alone,
)
from .tolerance import (
    assert_near,
    coarser,
    is_finite,
    largest,
    laws_in,
    must,
    same_bits,
    tame,
)


def law_residual_holds_what_is_missing(codec: Compressor, grad_N: Tensor) -> bool:
    """decode(encode(g, r)) + new r = g + r, to the working dtype's accuracy whatever
    the wire's.

    To do: set residual_N to gradient plus residual less what decode gives of this
    payload, element by element.
    """
    if not tame(grad_N):
        return False
    before_N = residual_for(grad_N)
    after_N = before_N.clone()
    payload = encoded(codec, grad_N, after_N)
    whole_N = before_N + grad_N
    sent_N = decoding(codec, payload, whole_N)
    assert_near(
        sent_N + after_N,
        whole_N,
        whole_N.dtype,
        magnitude=largest(whole_N, sent_N),
        terms=4,
        what="what was sent plus the new residual is not gradient plus old residual",
    )
    return True


def law_residual_form_encodes_the_sum(codec: Compressor, grad_N: Tensor) -> bool:
    """encode(g, r) has the bytes of encode(g + r), where g + r has the gradient's
    dtype.

    If what is sent depends on more than the sum, at least where r is 0.

    To do: add residual_N to the gradient before anything else is computed; if the two
    must be told apart, declare reads_latest=True.
    """
    if working_dtype(grad_N.dtype) != grad_N.dtype:
        return False
    residual_N = residual_for(grad_N)
    if codec.traits.reads_latest:
        residual_N.zero_()
    plain = encoded(codec, grad_N + residual_N)
    with_residual = encoded(codec, grad_N, residual_N)
    must(
        same_bits(content(with_residual), content(plain)),
        "with a residual the payload is not that of gradient plus residual",
    )
    return True


def law_residual_stays_finite(codec: Compressor, grad_N: Tensor) -> None:
    """No inf or NaN enters the residual.

    To do: end encode with residual_N.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).
    """
    residual_N = residual_for(grad_N)
    encoded(codec, grad_N, residual_N)
    must(is_finite(residual_N), "something not finite entered the residual")


def law_non_finite_is_visible(codec: Compressor, grad_N: Tensor) -> None:
    """An inf or NaN can be seen after decode, and nothing else looks like it.

    To do: let comparisons pass NaN on, as ~(abs(x) <= cut) does, and scale before a
    wire dtype overflows.
    """
    decoded_N = decoded_of(codec, grad_N, grad_N.dtype)
    if not is_finite(grad_N):
        must(not is_finite(decoded_N), "an inf or NaN was lost")
    elif tame(grad_N):
        must(is_finite(decoded_N), "a finite gradient decodes to an inf or NaN")


def law_non_finite_is_visible_with_residual(codec: Compressor, grad_N: Tensor) -> bool:
    """An inf or NaN in the gradient can be seen after decode, also where there is a
    residual.

    To do: add the residual to the gradient as it is, and clean the residual only after
    the payload is made.
    """
    if is_finite(grad_N):
        return False
    payload = encoded(codec, grad_N, residual_for(grad_N))
    decoded_N = decoding(codec, payload, grad_N, torch.float64)
    must(not is_finite(decoded_N), "the residual hid an inf or NaN")
    return True


def law_lossless_means_bit_equal(codec: Compressor, grad_N: Tensor) -> bool:
    """A lossless compressor gives the gradient back, bit for bit.

    To do: send the gradient's own dtype, or do not declare lossless=True.
    """
    if not codec.traits.lossless:
        return False
    decoded_N = decoded_of(codec, grad_N, grad_N.dtype)
    must(same_bits(decoded_N, grad_N), "lossless, yet bits changed")
    return True


def law_nonexpansive(codec: Compressor, grad_N: Tensor) -> bool:
    """||x - decode(encode(x))|| <= ||x||, for gradients within the wire dtype's range.

    To do: send magnitudes that are not too large, such as means of what they stand for,
    or do not declare nonexpansive=True.
    """
    if not codec.traits.nonexpansive or not tame(grad_N):
        return False
    whole_N = grad_N.double()
    left = float((whole_N - decoded_of(codec, grad_N, torch.float64)).norm())
    # Half a last place of the wire's least number of bits is rounding, not growth.
    must(
        left <= float(whole_N.norm()) * (1 + 1e-6),
        f"lost {left:.6g} of a gradient of norm {float(whole_N.norm()):.6g}",
    )
    return True


def law_unbiased(codec: Compressor, grad_N: Tensor) -> bool:
    """The mean of decode(encode(x)) over n steps nears x, element by element.

    Within z = 6 standard errors and 42 / n of the range that elements were seen to move
    in: what is sent in few steps may be sent in none of n, and shows no spread then.
    (The empirical Bernstein bound: Maurer and Pontil, COLT 2009, theorem 4, at odds of
    3e-8.)

    Elements below the trait ``unbiased_from`` may be lost. Others are met to the least
    float32, whatever their scale.

    To do: round at random with the right odds, draw anew in each step, divide what is
    dropped at random by its odds; multiply tiny elements and their scale by a power of
    two before you divide them; or do not declare unbiased=True, or declare it from a
    magnitude on, by unbiased_from.
    """
    says_more = codec.traits.lossless  # bit equality does, in one step
    if not codec.traits.unbiased or says_more or not tame(grad_N) or not grad_N.numel():
        return False
    num_steps = 400
    state = codec.init(spec_alone(grad_N))
    decoded_SN = torch.empty(
        num_steps, grad_N.numel(), dtype=working_dtype(grad_N.dtype)
    )
    for out_N in decoded_SN:
        payload, state = codec.encode(state, grad_N)
        codec.decode(payload, out_N)
    decoded_SN = decoded_SN.double()
    moved = float((decoded_SN.amax(0) - decoded_SN.amin(0)).max())
    # nothing was drawn: all it could have moved in
    range_ = moved or 2 * largest(decoded_SN)
    error_N = decoded_SN.std(0) / num_steps**0.5
    float32 = torch.finfo(torch.float32)
    rounding = float32.eps * (8 * largest(grad_N, decoded_SN) + float32.tiny)
    size_N = grad_N.double().abs()
    lost_N = size_N.where(size_N < codec.traits.unbiased_from, 0.0)
    allowed_N = 6 * error_N + 42 / num_steps * range_ + rounding + lost_N
    off_N = (decoded_SN.mean(0) - grad_N).abs()
    worst = int((off_N - allowed_N).argmax())
    must(
        bool(off_N[worst] <= allowed_N[worst]),
        f"unbiased, yet element {worst} is {float(grad_N[worst]):.6g} and its mean "
        f"over {num_steps} steps {float(off_N[worst]):.3g} off, allowed "
        f"{float(allowed_N[worst]):.3g}",
    )
    return True


def law_merge_adds_the_decoded(codec: Compressor, grad_N: Tensor) -> bool:
    """merge(payload, sum, scale) adds scale times the decoded gradient, to float32
    accuracy.

    Kernels take their scale as a float32.

    To do: leave merge to the base class, or add scale * decoded to sum_N.
    """
    if not tame(grad_N):
        return False
    payload = encoded(codec, grad_N)
    decoded_N = decoding(codec, payload, grad_N)
    start_N = residual_for(grad_N)
    for scale in (1.0, 0.25, 3.0):
        sum_N = start_N.clone()
        codec.merge(payload, sum_N, scale=scale)
        assert_near(
            sum_N,
            start_N + decoded_N * scale,
            torch.float32,
            magnitude=4 * largest(start_N, decoded_N),
            terms=2,
            what=f"merge with scale {scale} is not decode and add",
        )
    return True


def law_merge_all_is_merge_of_each(codec: Compressor, grad_N: Tensor) -> bool:
    """merge_all of several payloads is merge of each, to float32 accuracy.

    Where codecs decode by a transform, it is more accurate than that sum, and never
    less.

    To do: leave merge_all to the base class, or add up all payloads before you decode
    them.
    """
    if not tame(grad_N):
        return False
    dtype = working_dtype(grad_N.dtype)
    payloads = [
        encoded(codec, one_N) for one_N in (grad_N, -0.5 * grad_N, grad_N.flip(0))
    ]
    sum_N = residual_for(grad_N)
    want_N = residual_for(grad_N)
    sizes = [largest(decoding(codec, payload, grad_N)) for payload in payloads]
    for payload in payloads:
        codec.merge(payload, want_N, scale=0.25)
    codec.merge_all(payloads, sum_N, scale=0.25)
    assert_near(
        sum_N,
        want_N,
        coarser(dtype, torch.float32),
        magnitude=sum(sizes) + largest(want_N),
        terms=8,
        what="merge_all is not merge of each payload",
    )
    return True


def law_decode_scales(codec: Compressor, grad_N: Tensor) -> bool:
    """decode(payload, out, scale) is scale times decode(payload, out).

    To float32 accuracy or the gradient's own, whichever is coarser.

    To do: multiply what decode writes by scale.
    """
    if not tame(grad_N):
        return False
    for dtype in {grad_N.dtype, working_dtype(grad_N.dtype)}:
        plain_N = decoded_of(codec, grad_N, dtype).double()
        for scale in (0.5, 3.0):
            assert_near(
                decoded_of(codec, grad_N, dtype, scale),
                plain_N * scale,
                coarser(dtype, torch.float32),
                magnitude=3 * largest(plain_N),
                terms=2,
                what=f"decode with scale {scale}",
            )
    return True


def law_decode_overwrites(codec: Compressor, grad_N: Tensor) -> None:
    """``decode`` gives the same bits whatever ``out_N`` held, be it NaN.

    To do: write every element of out_N, zeros too (out_N.zero_() before a scatter), and
    never add to it.
    """
    payload = encoded(codec, grad_N)
    dtype = working_dtype(grad_N.dtype)
    results = [
        codec.decode(payload, torch.full((grad_N.numel(),), fill, dtype=dtype))
        for fill in (0.0, 5.0, float("nan"))
    ]
    must(same_bits(results[0], results[1]), "decode depends on what out_N held")
    must(same_bits(results[0], results[2]), "decode depends on a NaN that out_N held")


def law_additive_payloads_may_be_summed(codec: Compressor, grad_N: Tensor) -> bool:
    """decode(sum of values) = sum of decodes, which a library all-reduce relies on.

    To do: make decode linear in a single field called values, or do not declare
    additive=True.
    """
    if not codec.traits.additive or not tame(grad_N):
        return False
    codec = codec.for_world(3)
    grads = [grad_N, -0.5 * grad_N, grad_N.flip(0)]
    payloads = [encoded(codec, g) for g in grads]
    must(
        [f.name for f in payloads[0].format] == ["values"],
        "a sum needs one field, values",
    )
    want_N = torch.zeros(grad_N.numel(), dtype=working_dtype(grad_N.dtype))
    for payload in payloads:
        codec.merge(payload, want_N)
    for payload in payloads[1:]:
        payloads[0]["values"].add_(payload["values"])
    wire = payloads[0]["values"].dtype
    assert_near(
        decoding(codec, payloads[0], grad_N),
        want_N,
        wire,
        magnitude=3 * max(largest(grad_N), torch.finfo(wire).tiny),
        terms=4,
        what="the decoded sum of payloads is not the sum of the decoded",
    )
    return True


def law_sum_over_ranks_cannot_overflow(codec: Compressor, grad_N: Tensor) -> bool:
    """Additive payloads of W gradients near the end of the wire's range have a finite
    sum.

    To do: let for_world(world) divide by world before values are narrowed, and decode
    multiply by it.
    """
    if not codec.traits.additive:
        return False
    world = 8
    codec = codec.for_world(world)
    wire = codec.format(TensorSpec("", 1, grad_N.dtype)).fields[0].dtype
    top = 0.9 * min(torch.finfo(wire).max, torch.finfo(grad_N.dtype).max)
    big_N = torch.full((grad_N.numel(),), top, dtype=grad_N.dtype)
    payload = encoded(codec, big_N)
    values_N = payload["values"].clone()
    for _ in range(world - 1):
        payload["values"].add_(values_N)
    mean_N = codec.decode(payload, torch.empty_like(big_N), scale=1 / world)
    must(
        is_finite(mean_N),
        f"the sum of {world} gradients of {top:.4g} overflows",
    )
    coarse = max(torch.finfo(wire).eps, torch.finfo(grad_N.dtype).eps)
    must(
        bool(((mean_N.double() / top - 1).abs() <= world * coarse).all()),
        f"the mean of {world} gradients of {top:.4g} is another number",
    )
    return True


def law_settings_are_frozen_values(codec: Compressor, grad_N: Tensor) -> None:
    """Settings compare and hash by value and cannot be changed, as formats are cached
    by them.

    To do: make the class a @dataclass(frozen=True, kw_only=True) of plain values.
    """
    settings: Any = codec
    must(is_dataclass(settings), f"{type(codec).__name__} is no dataclass")
    must(replace(settings) == codec, "an equal copy is not equal")
    must(hash(replace(settings)) == hash(codec), "an equal copy has another hash")
    alone, plain = (
        made.format(spec_alone(grad_N)) for made in (codec.for_world(1), codec)
    )
    must(
        alone.size_bytes == plain.size_bytes,
        "among one rank the payload has another size",
    )
    for field in fields(settings):
        must(field.kw_only is True, f"{field.name} may be given by position")
        try:
            setattr(codec, field.name, getattr(codec, field.name))
        except FrozenInstanceError:
            continue
        raise LawBroken(f"{field.name} can be changed after construction")


LAWS = (
    *payloads.LAWS,
    *laws_in(globals()),
)
