"""The demo's methods follow from the compressors that are named."""

from __future__ import annotations

import pytest

from gradwire.bench.demo import Demo
from gradwire.bench.tasks import make_task
from gradwire.errors import InvalidSetting, UnknownName


def test_any_compressor_is_taken_by_name() -> None:
    assert Demo().methods[-2:] == ("gradwire-onebit", "gradwire-topk")
    demo = Demo(compressors=("qsgd", "none"))
    assert demo.methods == ("ddp", "ddp-fp16", "gradwire-qsgd", "gradwire-dense")


def test_everybody_trains_the_same_whatever_data_there_are() -> None:
    assert Demo().task == "text"
    with pytest.raises(InvalidSetting, match=r"dataset-fashion-mnist.* or use --task text"):
        make_task("fashion")  # tests find no data of others


def test_a_name_that_no_compressor_has_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'qsgd'"):
        Demo(compressors=("qsdg",))


@pytest.mark.parametrize("steps", [4, 41])
def test_steps_are_shared_out_among_the_turns(steps: int) -> None:
    with pytest.raises(InvalidSetting, match="steps must be a multiple of 4, 8 at least"):
        Demo(steps=steps)
