"""What ranks send each other as objects is plain data: no pickle of a peer runs a
program.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.runtime.engine.plain import (
    announced_by,
    packed,
    read_packed,
    values_of_all,
)
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net


class Harmful:
    """Its pickle writes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


def opened(data: torch.Tensor) -> Any:
    return read_packed(io.BytesIO(data.numpy().tobytes()))


def test_plain_data_come_back() -> None:
    """Numbers and arrays of numpy travel as plain ones."""
    given = {"a": [1, 2.5, None, "text", True], (0, "b"): {"c": torch.arange(3)}}
    found = opened(
        packed({**given, "lr": np.float64(0.5), "betas": (np.float32(1), [np.ones(2)])})
    )
    assert found.pop((0, "b"))["c"].tolist() == [0, 1, 2]
    assert (type(found["lr"]), found.pop("lr")) == (float, 0.5)
    assert found.pop("betas")[1][0].tolist() == [1, 1]
    assert found == {"a": [1, 2.5, None, "text", True]}


def test_a_pickle_that_would_run_is_neither_sent_nor_loaded(tmp_path: Path) -> None:
    harmful = {"state": Harmful(tmp_path / "written")}
    with pytest.raises(
        gw.InvalidSetting, match="tensors, numbers, text, lists and dicts travel"
    ):
        packed(harmful)
    file = io.BytesIO()
    torch.save(harmful, file)
    with pytest.raises(Exception, match="weights_only"):
        read_packed(io.BytesIO(file.getvalue()))
    assert not (tmp_path / "written").exists()


def all_reported(rank: int, world: int, path: Path) -> tuple[list[Any], str]:
    found = values_of_all({"rank": rank, "longer": "x" * rank * 1000})
    with pytest.raises(gw.InvalidSetting) as raised:
        values_of_all(Harmful(path) if rank == 1 else 0)
    return found, str(raised.value)


@pytest.mark.multi
def test_all_ranks_get_the_values_of_all(two: Ranks, tmp_path: Path) -> None:
    (one, others_word), (other, own_word) = two.run(all_reported, tmp_path / "written")
    assert one == other == [{"rank": r, "longer": "x" * r * 1000} for r in (0, 1)]
    assert "rank 1 of the group cannot send its state" in others_word
    assert own_word.startswith("a state cannot be sent to other ranks")
    assert not (tmp_path / "written").exists()


def reported(rank: int, world: int, path: Path) -> str:
    handle = gw.attach(Net(), DENSE)
    try:
        announced_by(handle._synchroniser.engine, 1, Harmful(path))
    except gw.InvalidSetting as error:
        return str(error)
    finally:
        handle.detach()
    return "nothing was raised"


@pytest.mark.multi
def test_a_value_that_is_not_plain_is_refused_on_all(
    two: Ranks, tmp_path: Path
) -> None:
    words = two.run(reported, tmp_path / "written")
    assert "rank 1 cannot send its state" in words[0]
    assert words[1].startswith("a state cannot be sent to other ranks")
    assert not (tmp_path / "written").exists()
