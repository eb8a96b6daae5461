"""The algorithms of kernels in eager torch, as one would write them there, to be timed
beside.

Each does the same work as our kernel: error feedback, the scale of each block, codes
packed into bytes and the residual that is left; and back, added to a sum. Shapes are
static, and only the residual and the sum are written in place, so that
``torch.compile`` can take them unchanged.

Where a gradient's length is no whole number of blocks, the last part is left out, under
1 %.

Letters: B blocks of L elements, so N = B * L.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.compress.int8 import int8
from gradwire.compress.onebit import onebit
from gradwire.contract import Compressor
from gradwire.errors import NotInstalled, invalid
from gradwire.kernels.compiler import find_compiler
from gradwire.kernels.libraries import has_triton
from gradwire_bench.micro.kernel import Peers, TimedCall
from gradwire_lab.compress.demo import demo
from gradwire_lab.compress.qsgd import qsgd
from gradwire_lab.compress.tbq import tbq
from gradwire_lab.compress.terngrad import terngrad

Sent = tuple[Tensor, ...]
"""The fields of a payload."""


@dataclass(frozen=True)
class Peer:
    """``encode(grad_N, residual_N)`` gives the fields, ``merge(fields, sum_N)`` adds
    them.
    """

    block: int
    encode: Callable[[Tensor, Tensor], Sent]
    merge: Callable[[Sent, Tensor], None]


def pack(codes_N: Tensor, bits: int) -> Tensor:
    """Codes of ``bits`` bits (uint8) as bytes, the first in the lowest bits."""
    groups = codes_N.view(-1, 8 // bits)
    packed = groups[:, 0]
    for place in range(1, 8 // bits):
        packed = packed | (groups[:, place] << (place * bits))
    return packed


def unpack(bytes_U: Tensor, bits: int) -> Tensor:
    """The codes in these bytes, as uint8."""
    mask = 2**bits - 1
    columns = [(bytes_U >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(columns, 1).flatten()


def _keep(residual_N: Tensor, whole_BL: Tensor, sent_BL: Tensor) -> None:
    left_BL = whole_BL - sent_BL
    old_BL = residual_N.view_as(left_BL)
    kept_BL = torch.where(torch.isfinite(left_BL), left_BL, old_BL)
    residual_N.copy_(kept_BL.view(-1))


def _onebit() -> Peer:
    codec = onebit()
    block = codec.block

    def encode(grad_N: Tensor, residual_N: Tensor) -> Sent:
        whole_BL = (grad_N + residual_N).view(-1, block)
        above_BL = whole_BL >= 0
        high_B = codec.stretch * _mean_where(whole_BL, above_BL)
        low_B = codec.stretch * _mean_where(whole_BL, ~above_BL)
        sent_BL = torch.where(above_BL, high_B[:, None], low_B[:, None])
        _keep(residual_N, whole_BL, sent_BL)
        codes_N = above_BL.view(-1).to(torch.uint8)
        return low_B, high_B, pack(codes_N, 1)

    def merge(sent: Sent, sum_N: Tensor) -> None:
        low_B, high_B, bits_U = sent
        above_BL = unpack(bits_U, 1).view(-1, block) == 1
        sent_BL = torch.where(above_BL, high_B[:, None], low_B[:, None])
        sum_N.add_(sent_BL.view(-1))

    return Peer(block, encode, merge)


def _mean_where(whole_BL: Tensor, chosen_BL: Tensor) -> Tensor:
    count_B = chosen_BL.sum(1)
    total_B = torch.where(chosen_BL, whole_BL, 0.0).sum(1)
    return torch.where(count_B > 0, total_B / count_B.clamp(min=1), 0.0)


def _tbq() -> Peer:
    codec = tbq()

    def encode(grad_N: Tensor, residual_N: Tensor) -> Sent:
        whole_N = grad_N + residual_N
        is_high_N = whole_N >= codec.threshold
        is_low_N = whole_N <= -codec.threshold
        codes_N = is_high_N.to(torch.uint8)
        codes_N = codes_N + 2 * is_low_N.to(torch.uint8)
        codes_N = torch.where(torch.isfinite(whole_N), codes_N, 3)
        _keep(residual_N, whole_N, value(codes_N))
        return (pack(codes_N, 2),)

    def value(codes_N: Tensor) -> Tensor:
        is_high_N = (codes_N == 1).float()
        is_low_N = (codes_N == 2).float()
        known_N = (is_high_N - is_low_N) * codec.threshold
        return torch.where(codes_N == 3, torch.nan, known_N)

    def merge(sent: Sent, sum_N: Tensor) -> None:
        sum_N.add_(value(unpack(sent[0], 2)))

    return Peer(64, encode, merge)


def _terngrad() -> Peer:
    codec = terngrad()
    block = codec.block
    clip = codec.clip
    assert clip is not None

    def encode(grad_N: Tensor, residual_N: Tensor) -> Sent:
        whole_BL = (grad_N + residual_N).view(-1, block)
        limit_B = clip * whole_BL.square().mean(1).sqrt()
        top_B = torch.minimum(whole_BL.abs().amax(1), limit_B)
        drawn_BL = torch.rand_like(whole_BL) * top_B[:, None]
        kept_BL = whole_BL.abs() > drawn_BL
        signs_BL = torch.where(whole_BL > 0, 2, 0)
        codes_BL = torch.where(kept_BL, signs_BL, 1).to(torch.uint8)
        _keep(residual_N, whole_BL, value(top_B, codes_BL))
        return top_B, pack(codes_BL.view(-1), 2)

    def value(top_B: Tensor, codes_BL: Tensor) -> Tensor:
        return (codes_BL.float() - 1) * top_B[:, None]

    def merge(sent: Sent, sum_N: Tensor) -> None:
        top_B, codes_U = sent
        codes_BL = unpack(codes_U, 2).view(-1, block)
        sum_N.add_(value(top_B, codes_BL).view(-1))

    return Peer(block, encode, merge)


def _qsgd() -> Peer:
    codec = qsgd()
    levels: int = 2 ** (codec.bitwidth - 1) - 1

    def encode(grad_N: Tensor, residual_N: Tensor) -> Sent:
        whole_BL = (grad_N + residual_N).view(-1, codec.block)
        norm_B = whole_BL.abs().amax(1)
        scale_B = torch.where(norm_B > 0, levels / norm_B, 0.0)
        scaled_BL = whole_BL.abs() * scale_B[:, None]
        drawn_BL = scaled_BL + torch.rand_like(scaled_BL)
        level_BL = drawn_BL.floor()
        signed_BL = torch.where(whole_BL < 0, -level_BL, level_BL)
        codes_BL = (levels + signed_BL).to(torch.uint8)
        _keep(residual_N, whole_BL, value(norm_B, codes_BL))
        return norm_B, pack(codes_BL.view(-1), codec.bitwidth)

    def value(norm_B: Tensor, codes_BL: Tensor) -> Tensor:
        step_B = norm_B / levels
        return (codes_BL.float() - levels) * step_B[:, None]

    def merge(sent: Sent, sum_N: Tensor) -> None:
        norm_B, codes_U = sent
        codes_BL = unpack(codes_U, codec.bitwidth).view(-1, codec.block)
        sum_N.add_(value(norm_B, codes_BL).view(-1))

    return Peer(codec.block, encode, merge)


def _int8() -> Peer:
    block = int8().block

    def encode(grad_N: Tensor, residual_N: Tensor) -> Sent:
        whole_BL = (grad_N + residual_N).view(-1, block)
        step_B = whole_BL.abs().amax(1) / 127
        per_step_B = torch.where(step_B > 0, 1 / step_B, 0.0)
        steps_BL = (whole_BL * per_step_B[:, None]).round()
        codes_BL = (steps_BL + 127).to(torch.uint8)
        _keep(residual_N, whole_BL, value(step_B, codes_BL))
        return step_B, codes_BL.view(-1)

    def value(step_B: Tensor, codes_BL: Tensor) -> Tensor:
        return (codes_BL.float() - 127) * step_B[:, None]

    def merge(sent: Sent, sum_N: Tensor) -> None:
        step_B, codes_N = sent
        codes_BL = codes_N.view(-1, block)
        sum_N.add_(value(step_B, codes_BL).view(-1))

    return Peer(block, encode, merge)


def _demo() -> Peer:
    """The tiles of a matrix of 64 columns, by products with the DCT's matrix.

    So the program that came with the paper does it (github.com/bloc97/DeMo), with
    float32 values.
    """
    side = demo().side
    keep = demo().keep
    at_S = torch.arange(side)
    angles_SS = math.pi / side * (at_S[:, None] + 0.5) * at_S
    basis_SS = torch.cos(angles_SS) * math.sqrt(2 / side)
    basis_SS[:, 0] /= math.sqrt(2)

    def cosines(tiles: Tensor, which: str) -> Tensor:
        basis = basis_SS.to(tiles.device)
        return torch.einsum(which, tiles, basis, basis)

    def encode(grad_N: Tensor, residual_N: Tensor) -> Sent:
        whole_N = grad_N + residual_N
        tiles = whole_N.view(-1, side, side)
        spectrum = cosines(tiles, "chw,hi,wj->cij")
        flat = spectrum.reshape(-1, side * side)
        places = flat.abs().topk(keep, dim=1, sorted=False).indices
        values = flat.gather(1, places)
        sent = places, values.bfloat16()
        residual_N.copy_(whole_N - decoded(sent))
        return sent

    def decoded(sent: Sent) -> Tensor:
        places, values = sent
        flat = values.new_zeros((len(places), side * side), dtype=torch.float32)
        flat.scatter_reduce_(
            1, places, values.float(), reduce="mean", include_self=False
        )
        spectrum = flat.view(-1, side, side)
        return cosines(spectrum, "cij,hi,wj->chw").reshape(-1)

    def merge(sent: Sent, sum_N: Tensor) -> None:
        sum_N.add_(decoded(sent))

    return Peer(side * side, encode, merge)


PEERS: dict[str, Callable[[], Peer]] = {
    "demo": _demo,
    "onebit": _onebit,
    "tbq": _tbq,
    "terngrad": _terngrad,
    "qsgd": _qsgd,
    "int8": _int8,
}
"""Functions that make the peers, by the name of the compressor."""
SELECTING = frozenset({"topk", "dgc", "graddrop", "gaussiank", "redsync", "sidco"})
"""The compressors whose peer is torch's ``topk``."""


def check_compiles(device: str) -> None:
    """Raises ``InvalidSetting`` where ``torch.compile`` lacks its compiler."""
    if device == "cpu" and find_compiler() is None:
        accepted = "asked for where there is a C++ compiler"
        raise invalid("--compiled", True, accepted, "apt install g++, or leave it out")
    if device != "cpu" and not has_triton():
        raise NotInstalled("torch.compile on a GPU", "triton", "triton")


def peers(kinds: Sequence[str], device: str) -> Peers:
    """The peers that ``micro/kernel.py`` times beside compressors: torch in each kind.

    Raises ``InvalidSetting`` for a kind that torch cannot compile here.
    """
    if "compiled" in kinds:
        check_compiles(device)
    return partial(peers_of, kinds=tuple(kinds))


def peers_of(
    codec: Compressor, grad_N: Tensor, out_N: Tensor, kinds: Sequence[str]
) -> dict[str, dict[str, TimedCall]]:
    """A peer's calls by case ("encode", "encode-plain", "decode") and kind ("eager",
    "compiled").

    Sparsifiers have one peer, torch's own selection: ``abs`` and ``topk``. ``out_N`` is
    written.
    """
    calls: dict[str, dict[str, TimedCall]] = {
        "encode": {},
        "encode-plain": {},
        "decode": {},
    }
    name = type(codec).__name__
    if name in SELECTING and "eager" in kinds:
        num_kept = max(1, round(getattr(codec, "density", 1.0) * grad_N.numel()))
        select = _selection(grad_N, out_N, num_kept)
        calls["encode"]["eager"] = calls["encode-plain"]["eager"] = select
    if name in PEERS and codec == type(codec)():
        for kind in kinds:
            encode, merge = _calls(
                PEERS[name](), grad_N, out_N, compiled=kind == "compiled"
            )
            calls["encode"][kind] = encode
            calls["decode"][kind] = merge
    return calls


def _selection(grad_N: Tensor, out_N: Tensor, num_kept: int) -> TimedCall:
    def select() -> None:
        torch.abs(grad_N, out=out_N)
        torch.take(grad_N, torch.topk(out_N, num_kept, sorted=False).indices)

    return select


def _calls(
    peer: Peer, grad_N: Tensor, out_N: Tensor, *, compiled: bool
) -> tuple[TimedCall, TimedCall]:
    numel = grad_N.numel() - grad_N.numel() % peer.block
    part_N = grad_N[:numel]
    sum_N = out_N[:numel]
    residual_N = torch.zeros_like(part_N)
    encode: Any = peer.encode
    merge: Any = peer.merge
    if compiled:
        encode = torch.compile(peer.encode, dynamic=False)
        merge = torch.compile(peer.merge, dynamic=False)
    sent = peer.encode(part_N, residual_N)
    return lambda: encode(part_N, residual_N), lambda: merge(sent, sum_N)
