"""A user's mistake gets a ValueError that says what was given, what is accepted and
what to do.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh

import gradwire as gw
from gradwire.errors import InvalidSetting, LoopMistake
from gradwire.planning.data.cluster import Host
from gradwire.runtime.settings import resolve
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.plans import drawn
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net, ddp, momentum, train


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def after_backward() -> nn.Module:
    model = linear()
    model(torch.ones(1, 3)).sum().backward()
    return model


def complex_rows() -> nn.Module:
    return nn.Embedding(3, 2, dtype=torch.complex64, sparse=True)


class OnlyTheForm:
    """No exchange, though it has the methods of one."""

    init = run = synchronise = lambda *_: None


WHAT = "a compressor, an exchange"
by_planner = gw.pilot.by_planner
HOSTS = gw.Cluster(
    num_ranks=4, rate_bytes_per_s=1e9, host=Host(num_ranks=2, rate_bytes_per_s=1e9)
)
MISTAKES: list[tuple[Callable[[], Any], Any, dict[str, Any], tuple[str, ...]]] = [
    (linear, "topq", {}, ("'topq'", "onebit", "mean 'topk'")),
    (linear, Path("topq"), {}, ("topq cannot be read", "No such file")),
    (linear, gw.compress.topk, {}, ("topk", WHAT, "write topk(), with its brackets")),
    (
        linear,
        OnlyTheForm(),
        {},
        ("OnlyTheForm", WHAT, "derive your own from gw.Exchange"),
    ),
    (linear, None, {}, ("got None", "a compressor")),
    (lambda: torch.ones(2), "topk", {}, ("'Tensor'", "nn.Module", "pass")),
    (
        frozen,
        "topk",
        {},
        ("no parameter that requires a gradient", "attach after requires_grad"),
    ),
    (
        complex_rows,
        "topk",
        {},
        ("weight", "complex64", "a real one for rows", "sparse=False"),
    ),
    (
        *(after_backward, "topk", {}),
        ("2 parameters hold gradients", "of an earlier backward pass", "zero_grad"),
    ),
    (linear, "zen", {}, ("the name of a collective and of a planner", "gw.plan('zen'")),
    (linear, "by_planner", {}, ("no planner is called ''", "usbyte")),
    (
        linear,
        "usbyte",
        {"num_channels": 2},
        ("num_channels must be None beside a plan",),
    ),
    (
        lambda: nn.Embedding(9, 4, sparse=True),
        "secopa",
        {},
        ("weight must be sparse=False beside by_planner('secopa'",),
    ),
    (linear, by_planner("secopa", density=7), {}, ("density must be ", "got 7; ")),
    (
        linear,
        by_planner("secopa", credit=8),
        {},
        ("credit of secopa's plan", "at most 4", "8; "),
    ),
    (linear, DENSE, {"bucket_cap_mb": 0}, ("bucket_cap_mb must be ", "got 0; ")),
    (linear, DENSE, {"num_channels": 2.5}, ("num_channels must be ", "got 2.5; ")),
    (linear, DENSE, {"timeout": 30}, ("timeout must be ", "got 30; ")),
    (linear, DENSE, {"trace_steps": -1}, ("trace_steps must be ", "got -1; ")),
    (
        linear,
        DENSE,
        {"cluster": "cluster.json"},
        ("cluster must be ", "gw.Cluster.load"),
    ),
    (
        linear,
        DENSE,
        {"cluster": HOSTS},
        ("ranks a host of cluster must be 1,", "got 2; "),
    ),
    (linear, DENSE, {"compress_if": None}, ("compress_if must be ", "got None; ")),
]
"""A model, an exchange, settings, and parts of the error."""


def test_an_optimizer_that_steps_in_a_backward_hook_is_refused() -> None:
    net = Net()
    handle = gw.attach(net, DENSE)
    own = momentum([net.deep.weight])
    net.deep.weight.register_post_accumulate_grad_hook(lambda _: own.step())
    with pytest.raises(
        LoopMistake, match=r"deep.weight changed during the backward pass"
    ):
        train(net, momentum(net.parameters()), 0, range(1))
    handle.detach()


@each(
    "make, exchange, settings, parts",
    MISTAKES,
    ids=[parts[0] for *_, parts in MISTAKES],
)
def test_each_mistake_is_refused_with_its_remedy(
    make: Callable[[], Any],
    exchange: Any,
    settings: dict[str, Any],
    parts: tuple[str, ...],
) -> None:
    model = make()
    with pytest.raises(InvalidSetting) as raised:
        gw.attach(model, exchange, **keywords(**settings))
    for part in parts:
        assert part in str(raised.value)


def test_a_path_that_is_a_name_stands_for_the_algorithm(tmp_path: Path) -> None:
    """``LightningCLI`` may make a path of any text; a plan's file stays one."""
    for name in ("topk", "auto"):
        assert resolve(Path(name)) == resolve(name)  # type: ignore[comparison-overlap]
    file = tmp_path / "plan"
    plan = drawn(0)
    plan.save(file)
    assert resolve(file) == plan


def test_a_second_attach_of_a_model_or_of_a_part_is_refused() -> None:
    outer = nn.Sequential(linear(), linear())
    handle = gw.attach(outer, "topk")
    for model in (outer, outer[0]):
        with pytest.raises(
            InvalidSetting, match=r"attached already.*handle\.detach\(\)"
        ):
            gw.attach(model, "onebit")
    handle.detach()
    gw.attach(outer[0], "onebit").detach()


def test_calls_during_a_backward_pass_are_refused() -> None:
    model, other = linear(), linear()
    handle = gw.attach(model, "topk")
    calls: dict[str, Callable[[], Any]] = {
        "attach": lambda: gw.attach(other, "topk"),
        "state_dict": handle.state_dict,
        "load_state_dict": lambda: handle.load_state_dict({}),
        "detach": handle.detach,
    }
    texts: dict[str, str] = {}

    def in_backward(grad: Tensor) -> None:
        for name, call in calls.items():
            with pytest.raises(InvalidSetting) as raised:
                call()
            texts[name] = str(raised.value)

    out = model(torch.ones(1, 3))
    out.register_hook(in_backward)
    out.sum().backward()
    assert handle.attached
    handle.detach()
    for name in calls:
        assert name in texts[name]
        assert "during a backward pass" in texts[name]


def on_ddp(rank: int, world: int) -> list[str]:
    taken = ddp(linear())
    taken.register_comm_hook(None, allreduce_hook)
    texts = []
    for make in (
        lambda: gw.attach(taken, "topk"),
        lambda: gw.attach(ddp(linear()), "topk", group=dist.group.WORLD),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            make()
        texts.append(str(raised.value))
    assert not taken._forward_pre_hooks, "what was refused keeps hooks of an attach"
    assert not taken.module._load_state_dict_post_hooks
    return texts


@pytest.mark.multi
def test_a_ddp_with_a_hook_or_with_another_group_is_refused(two: Ranks) -> None:
    for taken, group in two.run(on_ddp):
        assert "DDP refused the communication hook" in taken
        assert "one hook" in taken
        assert "build it without, then attach" in taken
        assert "DDP's own group is used" in group


def outside_the_group(rank: int, world: int) -> list[str]:
    group = dist.new_group([1])
    mesh = DeviceMesh("cpu", [1], mesh_dim_names=("dp",))
    reported = []
    for given in ({"group": group}, {"group": mesh}, {"shards": group}):
        if rank == 1:
            gw.attach(Net(), DENSE, **keywords(**{"group": group, **given})).detach()
            continue
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            gw.attach(Net(), DENSE, **keywords(**given))
        reported.append(str(raised.value))
    return reported


@pytest.mark.multi
def test_a_group_without_this_rank_is_refused(doomed_two: Ranks) -> None:
    """In ranks of its own, as one of them attaches more often than the other."""
    of_group, of_mesh, of_shards = doomed_two.run(outside_the_group)[0]
    for text, setting in (
        (of_group, "group"),
        (of_mesh, "group"),
        (of_shards, "shards"),
    ):
        assert f"this rank (0) is not in the group that it gave as {setting}=" in text
        assert "on the ranks of that group only" in text
        assert "-100" not in text


def test_a_keyword_that_went_into_an_object_is_refused_with_its_place() -> None:
    calls: Any = {"each step": gw.attach, "local": gw.local_steps}
    with pytest.raises(
        InvalidSetting, match=r"timeout= is .* failure=gw\.FailurePolicy\(timeout="
    ):
        calls["each step"](linear(), DENSE, timeout=30)
    with pytest.raises(
        InvalidSetting, match=r"local_steps\(\.\.\., options=gw\.Options\(shards="
    ):
        calls["local"](linear(), None, DENSE, every=2, shards=None)
    with pytest.raises(
        InvalidSetting, match=r"options must be a gw\.Options or None, got 'dict'"
    ):
        calls["each step"](linear(), DENSE, options={"num_channels": 2})


def dropped() -> weakref.ref[nn.Module]:
    model = linear()
    gw.attach(model, DENSE)
    model(torch.ones(1, model.in_features)).sum().backward()
    return weakref.ref(model)


def test_a_model_that_is_dropped_without_detach_is_freed() -> None:
    seen = dropped()
    gc.collect()
    assert seen() is None
