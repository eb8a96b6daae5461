"""State goes along to a framework's new DDP model, into files of ranks, and to other
ranks.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.errors import InvalidSetting
from gradwire.integrations.framework_attachment import FrameworkAttachment
from gradwire.runtime.local_steps.lock_step import LocalSteps
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.multi


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 1, bias=False))


def train(model: nn.Module, rank: int, steps: range) -> list[Tensor]:
    """Takes steps on data that follow from rank and step alone; returns the
    parameters.
    """
    for step in steps:
        draws = torch.Generator().manual_seed(100 * step + rank)
        model.zero_grad()
        model(torch.randn(4, 8, generator=draws)).sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.01 * param.grad
    return [param.detach().clone() for param in model.parameters()]


def attached(inner: nn.Module) -> tuple[FrameworkAttachment, nn.Module]:
    attachment = FrameworkAttachment(gw.compress.topk(density=0.1))
    model = DistributedDataParallel(inner)
    attachment.attach_to(model)
    return attachment, model


def wrapped_again(rank: int, world: int) -> bool:
    steps: list[int] = []
    attachment, model = attached(made())
    attachment.log_to(lambda step, row: steps.append(step), every=2)
    once = train(model, rank, range(6))
    attachment.handle.detach()
    inner = made()
    attachment, model = attached(inner)
    attachment.log_to(lambda step, row: steps.append(step), every=2)
    train(model, rank, range(3))
    del model
    attachment.let_go(inner)
    model = DistributedDataParallel(inner)
    attachment.attach_to(model)
    twice = train(model, rank, range(3, 6))
    num_handles, step = len(attachment.handles), attachment.handle.step
    attachment.handle.detach()
    assert steps == [2, 4, 6] * 2
    return num_handles == 1 and step == 6 and all(map(torch.equal, once, twice))


def test_residuals_go_along_to_a_new_ddp_of_the_same_module(two: Ranks) -> None:
    assert two.run(wrapped_again) == [True, True]


def saved(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    attachment, model = attached(made())
    train(model, rank, range(3))
    attachment.save(folder)
    owed = attachment.handle.residuals()
    attachment.handle.detach()
    return owed


def loaded(
    rank: int, world: int, folder: str
) -> tuple[dict[str, Tensor], str, list[str]]:
    """The residuals, the error if there is one, and what was logged."""
    heard, reported = [], ""
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    attachment, _ = attached(made())
    logging.getLogger("gradwire").addHandler(handler)
    try:
        attachment.load(folder.format(rank=rank))
    except InvalidSetting as error:
        reported = str(error)
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
        owed = attachment.handle.residuals()
        attachment.handle.detach()
    return owed, reported, heard


def test_ranks_find_what_as_many_or_more_have_saved(
    two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    before = four.run(saved, str(tmp_path))
    after = [owed for owed, *_ in two.run(loaded, str(tmp_path))]
    for name in before[0]:
        owed = sum(own[name] for own in before) / 4
        assert torch.allclose(sum(own[name] for own in after) / 2, owed, atol=1e-7)

    before = two.run(saved, str(tmp_path))
    names = ["gradwire-rank-0-of-2.pt", "gradwire-rank-1-of-2.pt"]
    # and the four's are gone
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for own, (found, *_) in zip(before, two.run(loaded, str(tmp_path)), strict=True):
        assert own.keys() == found.keys()
        assert any(bool(own[name].any()) for name in own)
        assert all(torch.equal(own[name], found[name]) for name in own)

    (tmp_path / names[1]).write_bytes(b"x")
    for _, reported, _ in two.run(loaded, str(tmp_path)):
        assert "cannot be read (rank 1: " in reported
    two.run(saved, str(tmp_path / "0"))
    for _, reported, _ in two.run(loaded, str(tmp_path / "{rank}")):
        assert "rank 1: it finds none" in reported
    for _, reported, heard in two.run(loaded, str(tmp_path / "nobody's")):
        assert not reported
        assert sum("holds no state" in line for line in heard) == 1


def locally(rank: int, world: int, folder: str) -> list[object]:
    """Steps and exchanges of local steps over two DDPs, two optimizers, and a load; the
    bits.
    """
    begin = partial(gw.local_steps, exchange="uniform", every=4)
    attachment, inner = (
        FrameworkAttachment(begin, options=gw.Options(num_channels=1)),
        made(),
    )

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            draws = torch.Generator().manual_seed(100 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=draws)).sum().backward()
            optimizer.step()

    first = torch.optim.SGD(inner.parameters(), 0.01)
    attachment.take(first)  # a framework may prepare it before the model
    model = DistributedDataParallel(inner)
    attachment.attach_to(model)
    assert isinstance(attachment.handle, LocalSteps)
    go_on(model, first, range(3))
    attachment.end_period()
    attachment.save(folder)
    # save has not ended the period again
    exchanges = [attachment.handle.stats()["exchanges"]]
    go_on(model, first, range(3, 5))
    attachment.let_go(inner)
    model = DistributedDataParallel(inner)
    attachment.attach_to(model)
    second = torch.optim.SGD(inner.parameters(), 0.01)
    attachment.take(second)
    go_on(model, second, range(5, 7))
    exchanges.append(attachment.handle.stats()["exchanges"])
    steps = attachment.handle.step
    attachment.load(folder)
    attachment.end_period()
    bits = [param.detach().clone() for param in inner.parameters()]
    found = [
        steps,
        *exchanges,
        attachment.handle.step,
        bits,
        attachment.handle.anchors(),
    ]
    attachment.handle.detach()
    return found


def test_local_steps_begin_with_the_optimizer_and_go_along_to_another(
    two: Ranks, tmp_path: Path
) -> None:
    for *counts, bits, anchors in two.run(locally, str(tmp_path)):
        assert counts == [7, 1, 1, 3]
        assert all(map(torch.equal, bits, anchors.values()))


def test_without_a_model_there_is_no_handle() -> None:
    with pytest.raises(InvalidSetting, match="there are 0"):
        _ = FrameworkAttachment("int8").handle
