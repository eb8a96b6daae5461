"""Peers of bench train: small packages with the interfaces of DeMo and others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradwire.errors import InvalidSetting
from gradwire_bench.training import trainer
from gradwire_bench.training.peers import PEERS, is_there
from gradwire_bench.training.tasks import make_task
from gradwire_bench.training.trainer import Trainer
from gradwire_bench.training.trainers import check_trainer, start
from gradwire_bench.training.training import TrainBench
from gradwire_bench.training.training_links import TrainingOnLinks

EMPTY = (
    *("dion/__init__.py", "accelerate/__init__.py", "accelerate/local_sgd.py"),
    *("torchft/__init__.py", "torchft/local_sgd.py"),
)
"""Packages that are there, and no more than that."""
SOURCES = {
    **dict.fromkeys(EMPTY, ""),
    "demo.py": """
import torch

class DeMo(torch.optim.SGD):
    def __init__(self, params, compression_decay=0.999, compression_topk=32,
                 compression_chunk=64, weight_decay=0.0, process_group=None, **kwargs):
        super().__init__(params, **kwargs)
""",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder with all packages, of which a process alone imports."""
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    packages = {name.partition("/")[0].removesuffix(".py") for name in SOURCES}

    def known() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in packages]

    for name in known():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(trainer.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(trainer.dist, "get_world_size", lambda: 1)
    yield str(tmp_path)
    for name in known():
        del sys.modules[name]


def trained(
    name: str, num_steps: int = 1, task: str = "gpt"
) -> tuple[Trainer, list[torch.Tensor]]:
    """A peer's trainer after some steps, and where its parameters began."""
    made = start(name, make_task(task, "sgd"), 20)
    first = [param.detach().clone() for param in made.plain.parameters()]
    for _ in range(num_steps):
        made.step()
    return made, first


def moved(made: Trainer, first: list[torch.Tensor]) -> bool:
    pairs = zip(made.plain.parameters(), first, strict=True)
    return any(not torch.equal(param, before) for param, before in pairs)


def test_demo_is_the_optimizer(folder: str) -> None:
    made, first = trained("peer-demo")
    assert type(made.optimizer).__name__ == "DeMo"
    assert moved(made, first)
    with pytest.raises(InvalidSetting, match="matrices and vectors"):
        trained("peer-demo", task="convnet")


def test_peers_that_are_not_there_are_named(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(is_there(name, ()) for name in PEERS)
    monkeypatch.setattr(sys, "path", [])
    assert not any(is_there(name, ()) for name in PEERS)
    settings = TrainBench(steps=40, trained=("topk", *PEERS))
    links = TrainingOnLinks(bench=settings, rates_bytes_per_s=(1e9,), goal_step=20)
    assert links.missing == tuple(PEERS)
    given = TrainingOnLinks(
        bench=settings, rates_bytes_per_s=(1e9,), goal_step=20, peers=(folder,)
    )
    assert given.missing == ()
    for name in PEERS:
        check_trainer(name)
