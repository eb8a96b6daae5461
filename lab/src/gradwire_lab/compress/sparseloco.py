"""sparseloco: the largest of every 4096 elements, each as a sign and one of two levels.

Source: Sarfi, Thérien, Lidin, Belilovsky 2025, arXiv 2508.15706, "Communication
    efficient LLM pre-training with SparseLoCo": chunks of 4096 elements, of which the
    largest are sent, quantised to 2 bits. It is made for pseudo-gradients
    (``gw.local_steps``).
Differences: the two levels are the mean magnitudes of what lies above and not above the
    mean of a chunk's kept magnitudes, so that nothing grows by being sent. A place
    takes 8 bits at the default density, where the paper packs 12. A tensor's last chunk
    is shorter, and sends at least one element. Error feedback keeps all that was not
    sent. ``gw.with_decoupled_momentum(sparseloco(), decay=0.95)`` lets it decay by 5 %
    in each step, as the paper does.
Default: density 1/64 is the paper's, for pseudo-gradients of many local steps.
    Gradients of single steps wait for dozens of steps with it, as with every sparsifier
    of that density.
Density: asked, rounded to whole elements of a chunk; so half to twice as much.
Wire: levels_2B bfloat16 (rounded towards zero), elias_fano of the places, codes_K in 2
    bits -> 4 * B + ceil(K b / 8) + ceil((K + floor((N - 1) / 2^b)) / 8) + ceil(K / 4)
    bytes, b = floor(log2((N - 1) / K)), B = ceil(N / 4096) chunks, K = max(1,
    round(density * 4096)) of each. Without places where K = N: 4 * B + ceil(N / 4).
State: none. Contributed: the decoded gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compress._coo import Coo, check_addressable, share_of
from gradwire.compress._residual import as_working
from gradwire.contract import Layout, Memory, Residual, State, Traits
from gradwire.contract.bounds import check_share
from gradwire.contract.payload import Field, Format, Payload
from gradwire.contract.spec import TensorSpec, clear_not_finite, spec_of
from gradwire.errors import invalid
from gradwire.kernels.codes import packed_codes, unpacked_codes
from gradwire.kernels.sparse.formats.elias_fano import (
    place_fields,
    read_places,
    write_places,
)

CHUNK = 4096
"""Elements that share two levels, and of which the largest are sent."""
_SIGN = 1
_HIGH = 2


@dataclass(frozen=True)
class ChunkedFormat(Format):
    """The layout of the kept elements of ``numel``."""

    numel: int = 0
    num_entries: int = 0


@dataclass(frozen=True, kw_only=True)
class sparseloco(Coo):
    """Sends the ``density`` share of each 4096 elements, as signs and two magnitudes.

    Args:
        density: The kept fraction k/n of each chunk, from 1/4096 to 1; default 1/64. A
            kept element then takes 10 bits, and a chunk 4 bytes. A larger density sends
            more bytes and loses less. 1 sends each element in 2 bits.

    >>> codec = sparseloco(density=0.5)
    >>> payload, _ = codec.encode(None, torch.tensor([1.0, -4.0, 2.0, 3.0, 0.5, 6.0]))
    >>> codec.decode(payload, torch.empty(6)), payload.size_bytes
    (tensor([ 0.0000, -3.5000,  0.0000,  3.5000,  0.0000,  6.0000]), 6)
    """

    density: float = 1 / 64
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE,
        nonexpansive=True,
        error_feedback=True,
        shared_scale=True,
        density_range=(0.5, 2.0),
    )

    def __post_init__(self) -> None:
        check_share("sparseloco density", self.density)
        if self.density * CHUNK < 1:
            raise invalid(
                "sparseloco density",
                self.density,
                f"at least 1/{CHUNK}, an element of a chunk",
                "use topk for less",
            )

    def format(self, spec: TensorSpec) -> Format:
        check_addressable("sparseloco", spec)
        whole, rest = divmod(spec.numel, CHUNK)
        kept = whole * share_of(self.density, CHUNK) + share_of(self.density, rest)
        # where all elements are sent, their places are known
        places = place_fields(kept, spec.numel) if kept < spec.numel else ()
        fields = (
            Field("levels", torch.bfloat16, 2 * -(-spec.numel // CHUNK)),
            *places,
            Field("codes", torch.uint8, -(-kept // 4)),
        )
        return ChunkedFormat(fields, spec.numel, kept)

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        payload = Payload.empty(self.format(spec_of(grad_N)), buffer, grad_N.device)
        sum_N = as_working(grad_N) if residual_N is None else residual_N.add_(grad_N)
        end = grad_N.numel() - grad_N.numel() % CHUNK
        chunks = [
            part
            for part in (sum_N[:end].view(-1, CHUNK), sum_N[None, end:])
            if part.numel()
        ]
        picked = [
            _largest(rows, share_of(self.density, rows.shape[1])) for rows in chunks
        ]
        made = [
            _coded(rows.gather(1, at)) for rows, at in zip(chunks, picked, strict=True)
        ]
        if made:
            levels_2B = torch.cat([levels.flatten() for levels, _ in made])
            payload["levels"].copy_(_towards_zero(levels_2B))
            start_B = torch.arange(0, grad_N.numel(), CHUNK, device=grad_N.device)
            rows = torch.split(start_B[:, None], [len(at) for at in picked])
            places_K = torch.cat(
                [(at + start).flatten() for at, start in zip(picked, rows, strict=True)]
            )
            if places_K.numel() < grad_N.numel():
                write_places(payload, places_K.int(), grad_N.numel())
            codes_K = torch.cat([codes.flatten() for _, codes in made])
            payload["codes"].copy_(packed_codes(codes_K, 2))
        if residual_N is not None:
            self.merge(payload, residual_N, scale=-1.0)
            clear_not_finite(residual_N)
        return payload, state

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        form = payload.format
        assert isinstance(form, ChunkedFormat)
        if form.num_entries == form.numel:
            indices_K = torch.arange(
                form.numel, dtype=torch.int32, device=payload["codes"].device
            )
        else:
            indices_K = read_places(payload, form.num_entries, form.numel)
        codes_K = unpacked_codes(payload["codes"], 2, indices_K.numel())
        place_K = torch.arange(
            indices_K.numel(), dtype=torch.int32, device=indices_K.device
        )
        chunk_K = place_K // share_of(self.density, CHUNK)
        levels_2B = payload["levels"].float()
        values_K = levels_2B[2 * chunk_K + (codes_K & _HIGH) // _HIGH]
        return indices_K, values_K * (1 - 2 * (codes_K & _SIGN))


def _largest(rows: Tensor, count: int) -> Tensor:
    """The places of the ``count`` largest magnitudes of every row, ascending.

    NaN is largest.
    """
    largest = rows.abs().topk(count, dim=1, sorted=False)
    return largest.indices.sort(dim=1).values


def _coded(kept: Tensor) -> tuple[Tensor, Tensor]:
    """The two levels of every row of kept elements, and each element's code."""
    size = kept.abs().double()
    is_high = size > (size / size.shape[1]).sum(1, keepdim=True)
    levels = [_mean(size, chosen) for chosen in (~is_high, is_high)]
    codes = torch.signbit(kept) * _SIGN + is_high * _HIGH
    return torch.stack(levels, dim=1), codes


def _towards_zero(levels_2B: Tensor) -> Tensor:
    """Levels in bfloat16, to which no finite level is too large."""
    bits_2B = levels_2B.float().view(torch.int32) & -(2**16)
    return bits_2B.view(torch.float32).bfloat16()


def _mean(size: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen elements of every row, which is 0 of none."""
    count = chosen.sum(1, keepdim=True).clamp_min(1)
    return (size / count).where(chosen, torch.zeros_like(size)).sum(1)


EXAMPLES = (sparseloco(),)
