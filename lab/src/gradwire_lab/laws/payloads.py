"""The laws of payloads: each takes any compressor and any flat gradient.

They ask of sizes, buffers and who may write what; ``compressors`` asks what is in a
payload.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.contract import Compressor, Residual
from gradwire.contract.payload import Payload
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import clone_state

from ..errors import LawBroken
from .tolerance import all_same_bits, largest, laws_in, must, same_bits, tame


def spec_alone(grad_N: Tensor) -> TensorSpec:
    """The spec of a gradient that is alone in its message."""
    return TensorSpec("gradient", grad_N.numel(), grad_N.dtype)


def encoded(codec: Compressor, grad_N: Tensor, residual_N: Residual = None) -> Payload:
    """The payload that a compressor makes of a gradient in its first step."""
    state = codec.init(spec_alone(grad_N))
    payload, _ = codec.encode(state, grad_N, residual_N=residual_N)
    return payload


def content(payload: Payload) -> Tensor:
    """The payload's bytes."""
    if payload.buffer is None:
        raise LawBroken("encode returned a payload without content")
    return payload.buffer


def decoded_of(
    codec: Compressor, grad_N: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """The gradient, encoded and then decoded into ``dtype``, times ``scale``."""
    out_N = torch.empty(grad_N.numel(), dtype=dtype)
    return codec.decode(encoded(codec, grad_N), out_N, scale=scale)


def decoding(
    codec: Compressor,
    payload: Payload,
    grad_N: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A payload of a gradient, decoded into ``dtype``, by default its working dtype."""
    out_N = torch.empty(grad_N.numel(), dtype=dtype or working_dtype(grad_N.dtype))
    return codec.decode(payload, out_N)


def residual_for(grad_N: Tensor) -> Tensor:
    """A residual of the gradient's own magnitude, in its working dtype."""
    dtype = working_dtype(grad_N.dtype)
    size = largest(grad_N) if tame(grad_N) else 1.0
    draw = torch.Generator().manual_seed(grad_N.numel())
    noise_N = torch.randn(grad_N.numel(), generator=draw, dtype=dtype)
    return noise_N.clamp_(-2, 2) * (0.25 * size)


def law_round_trip_keeps_shape_and_dtype(codec: Compressor, grad_N: Tensor) -> None:
    """``decode`` fills ``out_N`` itself and returns it, in the shape and dtype that it
    has.

    To do: write into out_N in place, and return out_N.
    """
    for dtype in {grad_N.dtype, working_dtype(grad_N.dtype)}:
        out_N = torch.empty(grad_N.numel(), dtype=dtype)
        back_N = codec.decode(encoded(codec, grad_N), out_N)
        must(
            back_N.data_ptr() == out_N.data_ptr(),
            "decode returns another tensor than out_N",
        )
        must(
            back_N.shape == grad_N.shape,
            f"{tuple(grad_N.shape)} came back {back_N.shape}",
        )
        must(back_N.dtype == dtype, f"decoded into {dtype}, returned {back_N.dtype}")


def law_stated_bytes_are_real(codec: Compressor, grad_N: Tensor) -> None:
    """A payload has as many bytes as ``format`` states, or not more where sizes vary.

    To do: make format(spec) list every field that encode fills, with its dtype and
    length; where sizes vary, declare exact_size=False and let format state the largest.
    """
    stated = codec.format(spec_alone(grad_N)).size_bytes
    payload = encoded(codec, grad_N)
    buffer = content(payload)
    must(buffer.dtype == torch.uint8, f"the payload is {buffer.dtype}")
    must(buffer.is_contiguous(), "the payload has gaps")
    real = buffer.numel()
    must(
        payload.size_bytes == real,
        f"payload says {payload.size_bytes} bytes, holds {real}",
    )
    if codec.traits.exact_size:
        must(stated == real, f"format says {stated} bytes, the payload has {real}")
    else:
        must(
            stated >= real,
            f"format says at most {stated} bytes, the payload has {real}",
        )


def law_size_only_payload_agrees(codec: Compressor, grad_N: Tensor) -> None:
    """A payload without content has the size of a real one, and gives none of its
    fields out.

    To do: build payloads from format(spec) alone, and leave reading fields to Payload.
    """
    empty = Payload(codec.format(spec_alone(grad_N)))
    if codec.traits.exact_size:
        real = encoded(codec, grad_N).size_bytes
        must(
            empty.size_bytes == real,
            f"size only: {empty.size_bytes} bytes, encoded: {real}",
        )
    for field in empty.format:
        try:
            empty[field.name]
        except InvalidSetting:
            continue
        raise LawBroken(f"a payload without content gave out its {field.name}")


def law_same_input_same_bits(codec: Compressor, grad_N: Tensor) -> None:
    """One gradient and one state give one payload, bit for bit.

    To do: draw random numbers from a seed and a step in the state, and keep nothing
    between calls outside of it.
    """
    state = codec.init(spec_alone(grad_N))
    bits = [codec.encode(clone_state(state), grad_N)[0] for _ in range(2)]
    must(same_bits(*map(content, bits)), "two encodings of one gradient differ")


def law_given_buffer_is_used(codec: Compressor, grad_N: Tensor) -> None:
    """The payload lies at the front of the buffer given, whatever that held.

    Nothing around the buffer is written.

    To do: encode into Payload.empty(form, buffer), and write every byte of it, padding
    too.
    """
    want = content(encoded(codec, grad_N))
    size = codec.format(spec_alone(grad_N)).size_bytes
    around = torch.full((size + 16,), 0xA5, dtype=torch.uint8)
    buffer = around[8 : 8 + size]
    state = codec.init(spec_alone(grad_N))
    payload, _ = codec.encode(state, grad_N, buffer=buffer)
    used = content(payload)
    real = payload.size_bytes
    must(used.data_ptr() == buffer.data_ptr() or not real, "another buffer was used")
    must(
        same_bits(used, want),
        "in a used buffer the payload has other bits than in a new one",
    )
    must(
        bool((around[:8] == 0xA5).all() & (around[8 + size :] == 0xA5).all()),
        "bytes outside the buffer were written",
    )


def law_received_bytes_are_the_payload(codec: Compressor, grad_N: Tensor) -> None:
    """The number of bytes received tells the payload's layout, and a copy decodes
    alike.

    Other numbers are refused.

    To do: make received(spec, size_bytes) the layout that encode chose, and raise
    self.no_such_size for any other size.
    """
    spec = spec_alone(grad_N)
    payload = encoded(codec, grad_N)
    form = codec.received(spec, payload.size_bytes)
    must(form == payload.format, f"sent {payload.format}, received {form}")
    decoded = [
        decoding(codec, sent, grad_N)
        for sent in (payload, Payload(form, content(payload).clone()))
    ]
    must(same_bits(*decoded), "a received copy decodes to something else")
    for wrong in (-1, codec.format(spec).size_bytes + 1):
        try:
            codec.received(spec, wrong)
        except InvalidSetting:
            continue
        raise LawBroken(f"{wrong} bytes were taken for a payload")


def law_typical_payload_is_one(codec: Compressor, grad_N: Tensor) -> None:
    """The typical payload has a size that payloads have, and is exact where sizes are.

    To do: let typical(spec) be a layout that received accepts, not larger than
    format(spec).
    """
    spec = spec_alone(grad_N)
    typical = codec.typical(spec)
    largest_form = codec.format(spec)
    must(
        typical.size_bytes <= largest_form.size_bytes, "typically more than the largest"
    )
    must(
        codec.received(spec, typical.size_bytes) == typical,
        "no payload is like the typical",
    )
    if codec.traits.exact_size:
        must(
            typical == largest_form,
            "all payloads are alike, and the typical one is not",
        )


def law_rank_changes_no_meaning(codec: Compressor, grad_N: Tensor) -> None:
    """A payload that one rank encodes, from a state made for any, decodes alike on
    every other.

    To do: let for_world change only what is encoded, such as a seed, and neither the
    layout nor decode.
    """
    one, other = (codec.for_world(3, rank) for rank in (1, 2))
    spec = spec_alone(grad_N)
    must(one.format(spec) == other.format(spec), "ranks have other layouts")
    payload, _ = one.encode(codec.for_world(3).init(spec), grad_N)
    decoded = [decoding(made, payload, grad_N) for made in (one, other)]
    must(same_bits(*decoded), "ranks decode one payload to different values")


def law_input_untouched(codec: Compressor, grad_N: Tensor) -> None:
    """``encode`` never writes its gradient.

    To do: work on a copy, or in the payload's own buffer.
    """
    for residual_N in (None, residual_for(grad_N)):
        before_N = grad_N.clone()
        encoded(codec, grad_N, residual_N)
        must(same_bits(grad_N, before_N), "encode wrote its input")


def law_payload_untouched_by_decode(codec: Compressor, grad_N: Tensor) -> None:
    """``decode`` and ``merge`` never write the payload.

    To do: read payload fields only; scale into out_N.
    """
    payload = encoded(codec, grad_N)
    before = content(payload).clone()
    sum_N = torch.zeros(grad_N.numel(), dtype=working_dtype(grad_N.dtype))
    codec.decode(payload, sum_N, scale=0.5)
    codec.merge(payload, sum_N, scale=0.5)
    must(same_bits(content(payload), before), "decode or merge wrote the payload")


def law_many_are_as_each_alone(codec: Compressor, grad_N: Tensor) -> None:
    """``encode_many``, ``decode_many`` and ``merge_many`` give the bits of a call for
    each.

    In two steps, as the first leaves its states and residuals to the second. So what is
    encoded together, in one message or in one call, is no more than a matter of speed.

    To do: let these methods compute nothing from several gradients at once, and use
    each one's own state, residual and buffer; or leave them to the base class.
    """
    third = grad_N.numel() // 3
    if third:
        grads = [grad_N[:third], grad_N, grad_N[third:]]
    else:
        grads = [grad_N, grad_N.flip(0)]
    forms = [codec.format(spec_alone(one_N)) for one_N in grads]
    together = [residual_for(one_N) for one_N in grads]
    alone = [residual_for(one_N) for one_N in grads]
    states = [codec.init(spec_alone(one_N)) for one_N in grads]
    own_states = [clone_state(state) for state in states]
    for _ in range(2):
        rooms = [_room(form.size_bytes) for form in forms]
        own_rooms = [_room(form.size_bytes) for form in forms]
        many = codec.encode_many(states, grads, together, rooms)
        each = [
            codec.encode(state, one_N, residual_N=residual_N, buffer=room)
            for state, one_N, residual_N, room in zip(
                own_states, grads, alone, own_rooms, strict=True
            )
        ]
        must(len(many) == len(grads), "encode_many returns another number of payloads")
        for (payload, _), (own, _), room in zip(many, each, rooms, strict=True):
            sent = content(payload)
            must(
                same_bits(sent, content(own)),
                "encode_many sends other bytes",
            )
            is_there = sent.data_ptr() == room.data_ptr()
            must(
                is_there or not payload.size_bytes,
                "encode_many does not use the given buffers",
            )
        must(all_same_bits(together, alone), "encode_many leaves other residuals")
        states = [state for _, state in many]
        own_states = [state for _, state in each]
    payloads = [payload for payload, _ in many]
    _must_agree(codec.decode_many, codec.decode, payloads, grads, "decode_many")
    _must_agree(codec.merge_many, codec.merge, payloads, grads, "merge_many")


def _room(size_bytes: int) -> Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8)


def _must_agree(
    many: Callable[..., object],
    one: Callable[..., object],
    payloads: Sequence[Payload],
    grads: Sequence[Tensor],
    name: str,
) -> None:
    """Whether one call for all payloads writes what a call for each does."""
    outs = [residual_for(grad_N) for grad_N in grads]
    own = [residual_for(grad_N) for grad_N in grads]
    many(payloads, outs, scale=0.5)
    for payload, own_N in zip(payloads, own, strict=True):
        one(payload, own_N, scale=0.5)
    must(all_same_bits(outs, own), f"{name} writes other values than a call for each")


LAWS = laws_in(globals())
