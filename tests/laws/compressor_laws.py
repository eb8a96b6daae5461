"""The laws of compressors: each takes any compressor and any flat gradient.

A law asks a compressor's traits whether it applies, and says nothing where it does not. The
residual that a law needs is made from the gradient's length, so that a failure can be repeated.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import torch
from torch import Tensor

from gradwire.contract import Compressor
from gradwire.errors import InvalidSetting
from gradwire.exchange import clone_state
from gradwire.payload import Payload
from gradwire.spec import TensorSpec, working_dtype

from .tolerance import assert_near, largest, same_bits, tame


def _spec(grad_N: Tensor) -> TensorSpec:
    return TensorSpec("gradient", grad_N.numel(), grad_N.dtype)


def _encoded(codec: Compressor, grad_N: Tensor, residual_N: Tensor | None = None) -> Payload:
    payload, _ = codec.encode(codec.init(_spec(grad_N)), grad_N, residual_N=residual_N)
    return payload


def _decoded(codec: Compressor, grad_N: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    out_N = torch.empty(grad_N.numel(), dtype=dtype)
    return codec.decode(_encoded(codec, grad_N), out_N, scale=scale)


def _residual_for(grad_N: Tensor) -> Tensor:
    """A residual of the gradient's own magnitude, in its working dtype."""
    dtype = working_dtype(grad_N.dtype)
    size = largest(grad_N) if tame(grad_N) else 1.0
    draw = torch.Generator().manual_seed(grad_N.numel())
    noise_N = torch.randn(grad_N.numel(), generator=draw, dtype=dtype)
    return noise_N.clamp_(-2, 2) * (0.25 * size)


def law_round_trip_keeps_shape_and_dtype(codec: Compressor, grad_N: Tensor) -> None:
    for dtype in {grad_N.dtype, working_dtype(grad_N.dtype)}:
        out_N = torch.empty(grad_N.numel(), dtype=dtype)
        back_N = codec.decode(_encoded(codec, grad_N), out_N)
        assert back_N.data_ptr() == out_N.data_ptr(), "decode returns another tensor than out_N"
        assert back_N.shape == grad_N.shape, f"{tuple(grad_N.shape)} came back {back_N.shape}"
        assert back_N.dtype == dtype, f"decoded into {dtype}, returned {back_N.dtype}"


def law_stated_bytes_are_real(codec: Compressor, grad_N: Tensor) -> None:
    stated = codec.format(_spec(grad_N)).size_bytes
    payload = _encoded(codec, grad_N)
    assert payload.buffer is not None, "encode returned a payload without content"
    assert payload.buffer.dtype == torch.uint8
    assert payload.buffer.is_contiguous()
    real = payload.buffer.numel()
    assert payload.size_bytes == real, f"payload says {payload.size_bytes} bytes, holds {real}"
    if codec.traits.exact_size:
        assert stated == real, f"format says {stated} bytes, the payload has {real}"
    else:
        assert stated >= real, f"format says at most {stated} bytes, the payload has {real}"


def law_size_only_payload_agrees(codec: Compressor, grad_N: Tensor) -> None:
    empty = Payload(codec.format(_spec(grad_N)))
    if codec.traits.exact_size:
        real = _encoded(codec, grad_N).size_bytes
        assert empty.size_bytes == real, f"size only: {empty.size_bytes} bytes, encoded: {real}"
    for field in empty.format:
        try:
            empty[field.name]
        except InvalidSetting:
            continue
        raise AssertionError(f"a payload without content gave out its {field.name}")


def law_same_input_same_bits(codec: Compressor, grad_N: Tensor) -> None:
    state = codec.init(_spec(grad_N))
    bits = [codec.encode(clone_state(state), grad_N)[0].buffer for _ in range(2)]
    assert same_bits(*bits), "two encodings of one gradient differ"


def law_given_buffer_is_used(codec: Compressor, grad_N: Tensor) -> None:
    """The payload lies at the front of the buffer given, whatever that held.

    Nothing around the buffer is written.
    """
    want = _encoded(codec, grad_N).buffer
    size = codec.format(_spec(grad_N)).size_bytes
    around = torch.full((size + 16,), 0xA5, dtype=torch.uint8)
    buffer = around[8 : 8 + size]
    payload, _ = codec.encode(codec.init(_spec(grad_N)), grad_N, buffer=buffer)
    used, real = payload.buffer, payload.size_bytes
    assert used.data_ptr() == buffer.data_ptr() or not real, "another buffer was used"
    assert same_bits(used, want), "in a used buffer the payload has other bits than in a new one"
    assert bool((around[:8] == 0xA5).all() & (around[8 + size :] == 0xA5).all()), (
        "bytes outside the buffer were written"
    )


def law_received_bytes_are_the_payload(codec: Compressor, grad_N: Tensor) -> None:
    """Their number tells their layout, and a copy decodes alike; other numbers are refused."""
    spec, payload = _spec(grad_N), _encoded(codec, grad_N)
    form = codec.received(spec, payload.size_bytes)
    assert form == payload.format, f"sent {payload.format}, received {form}"
    dtype = working_dtype(grad_N.dtype)
    decoded = [
        codec.decode(sent, torch.empty(grad_N.numel(), dtype=dtype))
        for sent in (payload, Payload(form, payload.buffer.clone()))
    ]
    assert same_bits(*decoded), "a received copy decodes to something else"
    for wrong in (-1, codec.format(spec).size_bytes + 1):
        try:
            codec.received(spec, wrong)
        except InvalidSetting:
            continue
        raise AssertionError(f"{wrong} bytes were taken for a payload")


def law_typical_payload_is_one(codec: Compressor, grad_N: Tensor) -> None:
    """Of a size that payloads have, and exact where sizes are."""
    spec = _spec(grad_N)
    typical, largest_form = codec.typical(spec), codec.format(spec)
    assert typical.size_bytes <= largest_form.size_bytes, "typically more than the largest"
    assert codec.received(spec, typical.size_bytes) == typical, "no payload is like the typical"
    if codec.traits.exact_size:
        assert typical == largest_form, "all payloads are alike, and the typical one is not"


def law_rank_changes_no_meaning(codec: Compressor, grad_N: Tensor) -> None:
    """What one rank encodes, from a state made for any, decodes alike on every other."""
    one, other = (codec.for_world(3, rank) for rank in (1, 2))
    spec, dtype = _spec(grad_N), working_dtype(grad_N.dtype)
    assert one.format(spec) == other.format(spec), "ranks have other layouts"
    payload, _ = one.encode(codec.for_world(3).init(spec), grad_N)
    decoded = [c.decode(payload, torch.empty(grad_N.numel(), dtype=dtype)) for c in (one, other)]
    assert same_bits(*decoded), "ranks decode one payload to different values"


def law_input_untouched(codec: Compressor, grad_N: Tensor) -> None:
    for residual_N in (None, _residual_for(grad_N)):
        before_N = grad_N.clone()
        _encoded(codec, grad_N, residual_N)
        assert same_bits(grad_N, before_N), "encode wrote its input"


def law_payload_untouched_by_decode(codec: Compressor, grad_N: Tensor) -> None:
    payload = _encoded(codec, grad_N)
    before = payload.buffer.clone()
    sum_N = torch.zeros(grad_N.numel(), dtype=working_dtype(grad_N.dtype))
    codec.decode(payload, sum_N, scale=0.5)
    codec.merge(payload, sum_N, scale=0.5)
    assert same_bits(payload.buffer, before), "decode or merge wrote the payload"


def law_residual_holds_what_is_missing(codec: Compressor, grad_N: Tensor) -> None:
    """decode(encode(g, r)) + new r = g + r, to the working dtype's accuracy whatever the wire's."""
    if not tame(grad_N):
        return
    before_N = _residual_for(grad_N)
    after_N = before_N.clone()
    payload = _encoded(codec, grad_N, after_N)
    whole_N = before_N + grad_N
    sent_N = codec.decode(payload, torch.empty_like(whole_N))
    assert_near(
        sent_N + after_N,
        whole_N,
        whole_N.dtype,
        magnitude=largest(whole_N, sent_N),
        terms=4,
        what="what was sent plus the new residual is not gradient plus old residual",
    )


def law_residual_form_encodes_the_sum(codec: Compressor, grad_N: Tensor) -> None:
    """encode(g, r) has the bytes of encode(g + r), where g + r has the gradient's dtype.

    If what is sent depends on more than the sum, at least where r is 0.
    """
    if working_dtype(grad_N.dtype) != grad_N.dtype:
        return
    residual_N = _residual_for(grad_N)
    if codec.traits.reads_latest:
        residual_N.zero_()
    plain = _encoded(codec, grad_N + residual_N)
    with_residual = _encoded(codec, grad_N, residual_N)
    assert same_bits(with_residual.buffer, plain.buffer), (
        "with a residual the payload is not that of gradient plus residual"
    )


def law_residual_stays_finite(codec: Compressor, grad_N: Tensor) -> None:
    residual_N = _residual_for(grad_N)
    _encoded(codec, grad_N, residual_N)
    assert bool(residual_N.isfinite().all()), "something not finite entered the residual"


def law_non_finite_is_visible(codec: Compressor, grad_N: Tensor) -> None:
    """What is not finite can be seen after decode, and nothing else looks like it."""
    decoded_N = _decoded(codec, grad_N, grad_N.dtype)
    if not bool(grad_N.isfinite().all()):
        assert not bool(decoded_N.isfinite().all()), "an inf or NaN was lost"
    elif tame(grad_N):
        assert bool(decoded_N.isfinite().all()), "a finite gradient decodes to an inf or NaN"


def law_non_finite_is_visible_with_residual(codec: Compressor, grad_N: Tensor) -> None:
    payload = _encoded(codec, grad_N, _residual_for(grad_N))
    decoded_N = codec.decode(payload, torch.empty(grad_N.numel(), dtype=torch.float64))
    if not bool(grad_N.isfinite().all()):
        assert not bool(decoded_N.isfinite().all()), "the residual hid an inf or NaN"


def law_lossless_means_bit_equal(codec: Compressor, grad_N: Tensor) -> None:
    if codec.traits.lossless:
        decoded_N = _decoded(codec, grad_N, grad_N.dtype)
        assert same_bits(decoded_N, grad_N), "lossless, yet bits changed"


def law_contraction(codec: Compressor, grad_N: Tensor) -> None:
    """||x - decode(encode(x))|| <= ||x||, for gradients within the wire dtype's range."""
    if not codec.traits.contraction or not tame(grad_N):
        return
    whole_N = grad_N.double()
    left = float((whole_N - _decoded(codec, grad_N, torch.float64)).norm())
    # Half a last place of the wire's least number of bits is rounding, not growth.
    assert left <= float(whole_N.norm()) * (1 + 1e-6), (
        f"lost {left:.6g} of a gradient of norm {float(whole_N.norm()):.6g}"
    )


def law_unbiased(codec: Compressor, grad_N: Tensor) -> None:
    """The mean of decode(encode(x)) over n steps nears x, element by element.

    Within z = 6 standard errors and 42 / n of the range that elements were seen to move in: what
    is sent in few steps may be sent in none of n, and shows no spread then. (The empirical
    Bernstein bound: Maurer and Pontil, COLT 2009, theorem 4, at odds of 3e-8.)
    """
    says_more = codec.traits.lossless  # bit equality does, in one step
    if not codec.traits.unbiased or says_more or not tame(grad_N) or not grad_N.numel():
        return
    num_steps, state = 256, codec.init(_spec(grad_N))
    decoded_SN = torch.empty(num_steps, grad_N.numel(), dtype=working_dtype(grad_N.dtype))
    for out_N in decoded_SN:
        payload, state = codec.encode(state, grad_N)
        codec.decode(payload, out_N)
    decoded_SN = decoded_SN.double()
    moved = float((decoded_SN.amax(0) - decoded_SN.amin(0)).max())
    range_ = moved or 2 * largest(decoded_SN)  # nothing was drawn: all it could have moved in
    error_N = decoded_SN.std(0) / num_steps**0.5
    rounding = 8 * torch.finfo(torch.float32).eps * largest(grad_N, decoded_SN)
    allowed_N = 6 * error_N + 42 / num_steps * range_ + rounding
    off_N = (decoded_SN.mean(0) - grad_N).abs()
    worst = int((off_N - allowed_N).argmax())
    assert bool(off_N[worst] <= allowed_N[worst]), (
        f"unbiased, yet element {worst} is {float(grad_N[worst]):.6g} and its mean over "
        f"{num_steps} steps {float(off_N[worst]):.3g} off, allowed {float(allowed_N[worst]):.3g}"
    )


def law_merge_adds_the_decoded(codec: Compressor, grad_N: Tensor) -> None:
    """To float32 accuracy: kernels take their scale as a float32."""
    if not tame(grad_N):
        return
    dtype = working_dtype(grad_N.dtype)
    payload = _encoded(codec, grad_N)
    decoded_N = codec.decode(payload, torch.empty(grad_N.numel(), dtype=dtype))
    start_N = _residual_for(grad_N)
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


def law_decode_scales(codec: Compressor, grad_N: Tensor) -> None:
    """To float32 accuracy or the gradient's own, whichever is coarser."""
    if not tame(grad_N):
        return
    for dtype in {grad_N.dtype, working_dtype(grad_N.dtype)}:
        plain_N = _decoded(codec, grad_N, dtype).double()
        for scale in (0.5, 3.0):
            assert_near(
                _decoded(codec, grad_N, dtype, scale),
                plain_N * scale,
                max(dtype, torch.float32, key=lambda d: torch.finfo(d).eps),
                magnitude=3 * largest(plain_N),
                terms=2,
                what=f"decode with scale {scale}",
            )


def law_decode_overwrites(codec: Compressor, grad_N: Tensor) -> None:
    payload = _encoded(codec, grad_N)
    dtype = working_dtype(grad_N.dtype)
    results = [
        codec.decode(payload, torch.full((grad_N.numel(),), fill, dtype=dtype))
        for fill in (0.0, 5.0, float("nan"))
    ]
    assert same_bits(results[0], results[1]), "decode depends on what out_N held"
    assert same_bits(results[0], results[2]), "decode depends on a NaN that out_N held"


def law_additive_payloads_may_be_summed(codec: Compressor, grad_N: Tensor) -> None:
    """decode(sum of values) = sum of decodes: what a library all-reduce relies on."""
    if not codec.traits.additive or not tame(grad_N):
        return
    codec = codec.for_world(3)
    grads = [grad_N, -0.5 * grad_N, grad_N.flip(0)]
    payloads = [_encoded(codec, g) for g in grads]
    assert [f.name for f in payloads[0].format] == ["values"], "a sum needs one field, values"
    dtype = working_dtype(grad_N.dtype)
    want_N = torch.zeros(grad_N.numel(), dtype=dtype)
    for payload in payloads:
        codec.merge(payload, want_N)
    for payload in payloads[1:]:
        payloads[0]["values"].add_(payload["values"])
    wire = payloads[0]["values"].dtype
    assert_near(
        codec.decode(payloads[0], torch.empty(grad_N.numel(), dtype=dtype)),
        want_N,
        wire,
        magnitude=3 * max(largest(grad_N), torch.finfo(wire).tiny),
        terms=4,
        what="the decoded sum of payloads is not the sum of the decoded",
    )


def law_sum_over_ranks_cannot_overflow(codec: Compressor, grad_N: Tensor) -> None:
    """Additive payloads of W gradients near the end of the wire's range have a finite sum."""
    if not codec.traits.additive:
        return
    world = 8
    codec = codec.for_world(world)
    wire = codec.format(TensorSpec("", 1, grad_N.dtype)).fields[0].dtype
    top = 0.9 * min(torch.finfo(wire).max, torch.finfo(grad_N.dtype).max)
    big_N = torch.full((grad_N.numel(),), top, dtype=grad_N.dtype)
    payload = _encoded(codec, big_N)
    values_N = payload["values"].clone()
    for _ in range(world - 1):
        payload["values"].add_(values_N)
    mean_N = codec.decode(payload, torch.empty_like(big_N), scale=1 / world)
    assert bool(mean_N.isfinite().all()), f"the sum of {world} gradients of {top:.4g} overflows"
    coarse = max(torch.finfo(wire).eps, torch.finfo(grad_N.dtype).eps)
    assert bool(((mean_N.double() / top - 1).abs() <= world * coarse).all()), (
        f"the mean of {world} gradients of {top:.4g} is another number"
    )


def law_settings_are_frozen_values(codec: Compressor, grad_N: Tensor) -> None:
    """Settings compare and hash by value (formats are cached by them) and cannot be changed."""
    assert replace(codec) == codec, "an equal copy is not equal"
    assert hash(replace(codec)) == hash(codec), "an equal copy has another hash"
    assert codec.for_world(1).format(_spec(grad_N)).size_bytes == (
        codec.format(_spec(grad_N)).size_bytes
    )
    for field in fields(codec):
        assert field.kw_only, f"{field.name} may be given by position"
        try:
            setattr(codec, field.name, getattr(codec, field.name))
        except FrozenInstanceError:
            continue
        raise AssertionError(f"{field.name} can be changed after construction")


LAWS = tuple(found for name, found in sorted(globals().items()) if name.startswith("law_"))
