"""Before the first gradient ranks compare what they attach: all of them hear of a
difference, and a rank of versions that nobody tried warns.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.errors import RanksDiffer
from gradwire.runtime.agreement import versions
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net, momentum, train


@each(
    "python, torch_version, named",
    [
        ((3, 11), "2.13.0+cpu", []),
        ((3, 14), "2.15.0", []),
        (
            (3, 15),
            "2.14.0a0+git1",
            ["Python 3.15: gradwire was tried with 3.11 to 3.14"],
        ),
        ((3, 11), "2.16.0.dev1", ["torch 2.16: gradwire was tried with 2.9 to 2.15"]),
        ((3, 11), "2.8.0", ["torch 2.8: gradwire was tried with 2.9 to 2.15"]),
    ],
)
def test_versions_that_nobody_tried_are_warned_of_once(
    python: tuple[int, int],
    torch_version: str,
    named: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    versions.warn_of_versions.cache_clear()
    caplog.clear()
    for _ in range(2):
        versions.warn_of_versions(python, torch_version)
    said = [record.getMessage() for record in caplog.records]
    assert [one[: len(start)] for one, start in zip(said, named, strict=True)] == named


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def widths(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def attach_with(model: nn.Module, exchange: Any = DENSE, **settings: Any) -> Any:
    return gw.attach(model, exchange, **keywords(**settings))


def with_buffer(size: int) -> nn.Module:
    model = linear()
    model.register_buffer("seen", torch.zeros(size))
    return model


def only_bias(name: str, param: Tensor) -> bool:
    return name.endswith("bias")


def only_weight(name: str, param: Tensor) -> bool:
    return name.endswith("weight")


DIFFERENCES: dict[str, tuple[Callable[[int], Any], str]] = {
    "shape": (
        lambda rank: attach_with(widths(3, 4 + rank)),
        "0.weight [4, 3] float32 (compressed) against 0.weight [5, 3] float32",
    ),
    "number of parameters": (
        lambda rank: attach_with(widths(*[3] * (2 + rank))),
        "2 parameters and buffers against 4",
    ),
    "frozen on one rank": (
        lambda rank: attach_with(linear() if rank else frozen_bias()),
        "bias [2] float32 (frozen) against bias [2] float32 (uncompressed)",
    ),
    "num_channels": (
        lambda rank: attach_with(linear(), num_channels=2 + rank),
        "num_channels is 2 against 3",
    ),
    "cluster": (
        lambda rank: attach_with(
            linear(), cluster=gw.Cluster(num_ranks=2, rate_bytes_per_s=1e6 * (1 + rank))
        ),
        "setting cluster is",
    ),
    "settings of the compressor": (
        lambda rank: attach_with(linear(), gw.compress.topk(density=[0.1, 0.2][rank])),
        "setting exchange is",
    ),
    "threads": (
        lambda rank: with_threads(1 + rank),
        "torch.get_num_threads() is 1 against 2",
    ),
    "compressed on one rank": (
        lambda rank: attach_with(
            linear(), "topk", compress_if=[only_bias, only_weight][rank]
        ),
        "weight [2, 3] float32 (uncompressed) against weight [2, 3] float32 "
        "(compressed)",
    ),
    "sparse on one rank": (
        lambda rank: attach_with(nn.Embedding(4, 2, sparse=bool(rank))),
        "weight [4, 2] float32 (compressed) against weight [4, 2] float32 (sparse)",
    ),
    "buffers": (
        lambda rank: attach_with(with_buffer(2 + rank)),
        "seen [2] float32 (buffer) against seen [3] float32 (buffer)",
    ),
}


def with_threads(num_threads: int) -> None:
    """LAPACK's results depend on them, and each rank orthogonalises for itself."""
    torch.set_num_threads(num_threads)
    try:
        gw.attach(linear(), gw.compress.onebit()).detach()  # which does not care
        gw.attach(linear(), gw.compress.powersgd(rank=2))
    finally:
        torch.set_num_threads(1)


def frozen_bias() -> nn.Module:
    model = linear()
    model.bias.requires_grad_(False)  # type: ignore[union-attr]
    return model


def differ(rank: int, world: int) -> dict[str, str]:
    texts = {}
    for name, (make, _) in DIFFERENCES.items():
        with pytest.raises(RanksDiffer) as raised:
            make(rank)
        texts[name] = str(raised.value)
    # The ranks can still talk to each other, and attach what they agree on.
    train(net := Net(), momentum(net.parameters()), rank, range(1))
    net.zero_grad()
    handle = gw.attach(net, DENSE)
    train(net, momentum(net.parameters()), rank, range(1))
    handle.detach()
    return texts


@pytest.mark.multi
def test_ranks_that_differ_all_hear_of_the_difference(
    two: Ranks, subtests: pytest.Subtests
) -> None:
    first, second = two.run(differ)
    assert first == second
    for name, (_, said) in DIFFERENCES.items():
        with subtests.test(name):
            for part in ("rank 0 and rank 1", "start all ranks with the same", said):
                assert part in first[name]


def one_refuses(rank: int, world: int) -> tuple[str, str]:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        gw.attach(linear(), DENSE, options=gw.Options(num_channels=4 if rank else 0))
    handle = gw.attach(linear(), DENSE)  # all ranks are still in step with each other
    handle.detach()
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.multi
def test_a_rank_that_refuses_tells_the_others(two: Ranks) -> None:
    (own, reason), (other, reported) = two.run(one_refuses)
    assert (own, other) == ("InvalidSetting", RanksDiffer.__name__)
    assert reason == "num_channels must be an integer of at least 1, got 0; write 4"
    assert reported == f"rank 0 refused to attach: InvalidSetting: {reason}"


def calls_its_own(rank: int, world: int) -> str:
    model = linear()
    optimizer = momentum(model.parameters())
    with pytest.raises(RanksDiffer) as raised:
        _ = (
            gw.local_steps(model, optimizer, DENSE, every=4)
            if rank
            else gw.attach(model, DENSE)
        )
    return str(raised.value)


@pytest.mark.multi
def test_ranks_that_call_different_functions_hear_which(two: Ranks) -> None:
    for text in two.run(calls_its_own):
        assert "setting call is 'gw.attach' against 'gw.local_steps'" in text
