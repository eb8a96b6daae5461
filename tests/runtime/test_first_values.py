"""attach sends the values that ranks do not share yet, and no others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.contract.verbs import Broadcast, Verb
from gradwire.runtime.step.integrity import digests_of
from gradwire.runtime.transport import wire
from tests.each import each
from tests.runtime.ranks import Ranks


def model(rank: int, kind: str) -> nn.Module:
    """A model whose values differ among ranks as the kind says."""
    torch.manual_seed(rank if kind == "all" else 0)
    made = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    made[0].requires_grad_(False)
    if kind == "one element" and rank:
        with torch.no_grad():
            made[2].weight[1, 2] += 1.0
    if kind == "frozen" and rank:
        made[0].weight.add_(1.0)
    if kind == "buffer" and rank:
        made[1].num_batches_tracked.add_(1)
    return made


def first_values(rank: int, world: int, kind: str) -> tuple[list[int], list[int]]:
    """Bytes of each broadcast of an attach, and digests of what ranks have then."""
    sent: list[int] = []
    real = wire.carry_out

    def counting(verbs: list[Verb], *args: object, **settings: object) -> None:
        sent.extend(verb.buf.nbytes for verb in verbs if isinstance(verb, Broadcast))
        real(verbs, *args, **settings)  # type: ignore[arg-type]

    wire.carry_out = counting  # type: ignore[assignment]
    try:
        made = model(rank, kind)
        handle = gw.attach(made, "none")
    finally:
        wire.carry_out = real
    handle.detach()
    return sent, digests_of([*made.parameters(), *made.buffers()])


SENT = {
    "nothing": [],
    "one element": [15 * 4],
    "frozen": [30 * 4],
    "buffer": [8],
    # weights and the first bias: batch norm has the same values on all ranks
    "all": [(30 + 5 + 15 + 3) * 4],
}


@pytest.mark.multi
@each("kind", SENT)
def test_attach_sends_what_differs(four: Ranks, kind: str) -> None:
    first = model(0, kind)
    wanted = digests_of([*first.parameters(), *first.buffers()])
    for sent, digests in four.run(first_values, kind):
        assert sent == SENT[kind]
        assert digests == wanted


KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SHAPES = ((), (0,), (7,), (4, 6))


def drawn(seed: int) -> list[torch.Tensor]:
    """Tensors of all kinds and shapes, one of them a view across rows."""
    torch.manual_seed(seed)
    made = [torch.randn(shape).mul(9).to(kind) for kind in KINDS for shape in SHAPES]
    return [*made, torch.randn(6, 4).t()]


def in_batches(rank: int, world: int, most_bytes: int) -> bool:
    """Whether rank 1's tensors replace all, in batches of ``most_bytes``."""
    usual = wire.BATCH_BYTES
    wire.BATCH_BYTES = most_bytes
    tensors = drawn(rank)
    group = dist.group.WORLD
    assert group is not None
    try:
        channel = group._get_backend(torch.device("cpu"))
        wire.broadcast_all(tensors, channel, src=1)
    finally:
        wire.BATCH_BYTES = usual
    return all(map(torch.equal, tensors, drawn(1)))


@pytest.mark.multi
@each("most_bytes", (1, 64, 2**20))
def test_batches_hold_tensors_of_all_kinds(four: Ranks, most_bytes: int) -> None:
    assert all(four.run(in_batches, most_bytes))
