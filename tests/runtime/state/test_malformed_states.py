"""No state_dict, however wrong, raises anything but InvalidSetting or costs what was
kept before.

A sound state_dict is made wrong in one place at a time, in every place and in every way
there is a kind of. Either it is loaded, and training goes on with it, or it is refused
and nothing happened.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.state import leaves
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import clone_state
from gradwire.exchange.local import drive
from gradwire.runtime.engine.plain import packed, read_packed
from gradwire.runtime.settings import tables
from gradwire.runtime.state.checkpoint import collect, loaded
from gradwire.runtime.state.table import Origin
from gradwire.runtime.step.layout import ParamRange
from gradwire.runtime.step.messages import Message
from gradwire.runtime.step.report import Record
from gradwire_lab.laws.tolerance import same_bits
from tests.each import each

codecs, together = gw.compress, gw.collective
WORLD = 2
EXCHANGES: dict[str, Exchange] = {
    "deft": gw.exchange_for(codecs.deft(density=0.1)),
    "all of dgc": gw.deep_gradient_compression(
        warmup_steps=4, density=0.1, clip_norm=1.0, sample_share=1.0
    ),
    "powersgd": gw.exchange_for(codecs.powersgd(rank=1)),
    "qsgd in chunks": gw.with_error_feedback(
        gw.pair(codecs.qsgd(bitwidth=8), together.casync_ps())
    ),
    "rows": gw.with_error_feedback(gw.with_natural_sparsity(codecs.none(), 4)),
}
SHAPES = {"first": (16, 12), "bias": (12,), "last": (8, 16)}


def messages(exchange: Exchange, rank: int) -> list[Message]:
    """Two: of the first two parameters, and of the last one."""
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    together = (("first", "bias"), ("last",))
    return [
        Message(
            i,
            [ParamRange.whole(name, params[name]) for name in names],
            exchange,
            rank,
            WORLD,
        )
        for i, names in enumerate(together)
    ]


def step(ranks: list[list[Message]], number: int) -> list[Tensor]:
    """One step of all ranks; the means that the first one gets."""
    draw = torch.Generator().manual_seed(number)
    grads = [
        {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
        for _ in ranks
    ]
    for of_ranks in zip(*ranks, strict=True):
        drive([m.steps(dict(g)) for m, g in zip(of_ranks, grads, strict=True)])
        for message, own in zip(of_ranks, grads, strict=True):
            message.buffer.scatter(dict(own))
    return list(grads[0].values())


def origin(rank: int) -> Origin:
    return Origin("an exchange", WORLD, rank, "part 0 of 1")


def trained(exchange: Exchange) -> list[list[Message]]:
    ranks = [messages(exchange, rank) for rank in range(WORLD)]
    for number in range(3):
        step(ranks, number)
    return ranks


def saved(ranks: list[list[Message]]) -> list[dict[str, Any]]:
    return [collect(own, origin(r), step=3, run="a run") for r, own in enumerate(ranks)]


class Odd:
    """Something that no checkpoint holds, and that objects to being looked at."""

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError("compared")

    __hash__ = None  # type: ignore[assignment]


ODDITIES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "huge": lambda: 2**70,
    "nan": lambda: math.nan,
    "text": lambda: "x" * 1000,
    "list": lambda: [1, [2, {"a": None}]],
    "empty dict": dict,
    "odd keys": lambda: {1: {None: ...}, (2,): []},
    "deep": lambda: {"first": {"residual_N": {"residual_N": {}}}},
    "of other things": lambda: {"first": {"residual_N": "text"}, "new": {}},
    "object": Odd,
    "ints": lambda: torch.tensor([1, 2]),
    "meta": lambda: torch.empty(4, device="meta"),
}

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "longer": lambda t: torch.cat([t.flatten(), t.flatten(), t.new_ones(1)]),
    "shorter": lambda t: t.flatten()[:-1],
    "nothing": lambda t: t.new_zeros(0),
    "no dimension": lambda t: t.new_ones(()),
    "transposed": lambda t: t.t() if t.dim() == 2 else t.flip(0),
    "float64": lambda t: t.double(),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "int64": lambda t: t.long(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "one inf": lambda t: one_of(t, math.inf),
    "one nan": lambda t: one_of(t, math.nan),
    "negative": lambda t: t.abs().neg() - 1,
    "huge": lambda t: torch.full_like(t, largest(t)),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "requires grad": lambda t: (
        t.clone().requires_grad_() if t.is_floating_point() else nn.Parameter(t, False)
    ),
    "of a graph": lambda t: (
        t.clone().requires_grad_() * 1 if t.is_floating_point() else t * 1
    ),
    "expanded": lambda t: t.flatten()[:1].expand(t.numel()).reshape(t.shape),
    "inference": lambda t: in_inference(t),
    "array": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    "subclass": lambda t: t.as_subclass(OwnTensor),
}
"""What a tensor may become. Those that hold the same values are loaded."""


class OwnTensor(Tensor):
    """A tensor that does something else."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ZeroDivisionError("looked at")


def one_of(tensor: Tensor, value: float) -> Tensor:
    found = tensor.clone().float()
    found.view(-1)[-1:] = value
    return found


def largest(tensor: Tensor) -> float:
    kind: Any = torch.finfo if tensor.is_floating_point() else torch.iinfo
    return kind(tensor.dtype).max  # type: ignore[no-any-return]


def in_inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def places(
    tree: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The path of every value, however deep."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def value_at(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def changed(
    tree: dict[str, Any], path: tuple[str, ...], change: Callable[[Any], Any]
) -> Any:
    """A copy in which one value is another; without it, if the change returns
    ``...``.
    """
    made = {**tree}
    head, *rest = path
    if rest:
        made[head] = changed(tree[head], tuple(rest), change)
    elif (value := change(tree[head])) is ...:
        del made[head]
    else:
        made[head] = value
    return made


def wrong_ones(good: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The state_dict with one thing wrong, and what that is."""
    for path in places(good):
        where = "/".join(path)
        yield f"{where} missing", changed(good, path, lambda _: ...)
        for name, make in ODDITIES.items():
            yield f"{where} {name}", changed(good, path, lambda _, make=make: make())
        if isinstance(value_at(good, path), Tensor):
            for name, change in CHANGES.items():
                try:
                    with warnings.catch_warnings(action="ignore"):
                        made = change(value_at(good, path))
                except (RuntimeError, TypeError, NotImplementedError):
                    continue  # there is no such tensor
                yield f"{where} {name}", changed(good, path, lambda _, made=made: made)


def outcome(call: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Any, str]:
    """What a call returns, or how it refused."""
    try:
        return call(*args, **settings), ""
    except InvalidSetting as error:
        return None, str(error)


def bits(own: list[Message]) -> list[tuple[int, Tensor]]:
    """Every tensor that is kept: which one it is, and what it holds."""
    tensors = [tensor for message in own for _, tensor in leaves(message.state)]
    return [(id(tensor), tensor.clone()) for tensor in tensors]


def is_untouched(own: list[Message], before: list[tuple[int, Tensor]]) -> bool:
    now = bits(own)
    pairs = zip(now, before, strict=True)
    return all(a[0] == b[0] and same_bits(a[1], b[1]) for a, b in pairs)


def assert_sound(ranks: list[list[Message]], states: list[Any], what: str) -> None:
    """Training goes on with these states: on all ranks alike, as they would agree on
    them.
    """
    for message, state in zip(ranks[0], states, strict=True):
        for path, tensor in leaves(state):
            fresh = dict(leaves(message.state))[path]
            assert (tensor.shape, tensor.dtype) == (fresh.shape, fresh.dtype), (
                f"{what}: {path}"
            )
            assert not tensor.requires_grad, f"{what}: {path}"
            assert not tensor.is_inference(), f"{what}: {path}"
    members = [message for own in ranks for message in own]
    before = [clone_state(message.state) for message in members]
    for message, state in zip(members, states * WORLD, strict=True):
        message.state = clone_state(state)
    means = step(ranks, 7)
    for message, state in zip(members, before, strict=True):
        message.state = state
    if "huge" not in what:  # numbers at the end of the range may leave it
        assert all(bool(mean.isfinite().all()) for mean in means), what


FEW = ("all of dgc", "rows")
"""Those of the most fields and of the fewest; others are slow."""
NAMES = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
    for name in EXCHANGES
]


@pytest.mark.parametrize(
    ("name", "strict"),
    [
        *((name, True) for name in FEW),
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in EXCHANGES
            if name not in FEW
        ),
        ("all of dgc", False),
    ],
)
def test_a_state_is_loaded_or_refused_and_never_half_of_both(
    name: str, strict: bool
) -> None:
    ranks = trained(EXCHANGES[name])
    good = saved(ranks)[0]
    before = bits(ranks[0])
    accepted = []
    for what, wrong in wrong_ones(good):
        states, refusal = outcome(loaded, wrong, ranks[0], origin(0), strict=strict)
        assert is_untouched(ranks[0], before), what
        if refusal:
            assert "; " in refusal, f"{what}: {refusal}"
            continue
        accepted.append(what)
        assert_sound(ranks, states, what)
        before = bits(ranks[0])
    same_values = [
        what for what in accepted if what.rpartition(" ")[2] in ("grad", "graph")
    ]
    num_tensors = sum(isinstance(value_at(good, path), Tensor) for path in places(good))
    assert len(same_values) == 2 * num_tensors, "what differs in form alone was refused"


@pytest.mark.parametrize("name", NAMES)
def test_redistribution_takes_or_refuses_any_state(name: str) -> None:
    whole = saved(trained(EXCHANGES[name]))
    for rank, good in enumerate(whole):
        for what, wrong in wrong_ones(good):
            given = [wrong if r == rank else own for r, own in enumerate(whole)]
            for world in (1, 4):
                shared, refusal = outcome(gw.redistribute, given, world)
                if refusal:
                    assert "; " in refusal, f"{what}: {refusal}"
                    continue
                tensors = [field for new in shared for field in values(new["params"])]
                assert not any(t.requires_grad for _, t in tensors), what
                assert all(
                    bool(t.isfinite().all())
                    for path, t in tensors
                    if path.endswith("_N")
                )


def values(tree: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for path in places(tree):
        if isinstance(found := value_at(tree, path), Tensor):
            yield path[-1], found


def kind(given: Any) -> str:
    return type(given).__name__


@each("given", [None, 3, "x", {}, [None], [[]], Odd(), torch.zeros(2)], ids=kind)
def test_what_is_no_list_of_states_is_refused(given: Any) -> None:
    with pytest.raises(InvalidSetting, match="; "):
        gw.redistribute(given, 2)


@each("world_size", [0, 1.5, True, "2", None, torch.tensor(2)], ids=kind)
def test_a_world_of_no_size_is_refused(world_size: Any) -> None:
    with pytest.raises(
        InvalidSetting, match="world_size must be a whole number, 1 to 2"
    ):
        gw.redistribute(saved(trained(EXCHANGES["deft"])), world_size)


def test_a_handle_that_refuses_trains_on_as_if_nothing_had_been_given() -> None:
    """Through the public interface, of a model with each kind of parameter."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5000, 16), nn.Flatten(), nn.Linear(32, 4))
    assert tables(net)
    handle = gw.attach(net, EXCHANGES["all of dgc"])
    twin = copy.deepcopy(handle.state_dict())
    for what, wrong in wrong_ones(handle.state_dict()):
        _, refusal = outcome(handle.load_state_dict, wrong)
        if not refusal:
            handle.load_state_dict(twin)
        now = handle.state_dict()
        for path in places(twin):
            if isinstance(value_at(twin, path), Tensor):
                assert same_bits(value_at(now, path), value_at(twin, path)), what
    net(torch.arange(6).view(3, 2)).sum().backward()
    handle.detach()


# ---- Numbers at the end of their range -----------------------------------------------


def test_a_step_leaves_room_for_all_steps_to_come() -> None:
    """A step is sent to other ranks as 64 bits, and counted on."""
    net = nn.Linear(4, 2)
    handle = gw.attach(net, "topk")
    good = handle.state_dict()
    for step in (2**62 + 1, 2**63 - 2, 2**63 - 1, 2**63, 2**64):
        with pytest.raises(
            InvalidSetting, match=r"step of state_dict must be .* 2\*\*62, got"
        ):
            handle.load_state_dict({**good, "step": step})
    handle.load_state_dict({**good, "step": 2**62})
    net(torch.ones(1, 4)).sum().backward()
    assert Record(num_steps=handle.step).packed()
    handle.detach()


PERIODS = ("position", "left")


@each("key", ["local_step", *PERIODS])
def test_numbers_of_local_steps_are_within_bounds(key: str) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    handle = gw.local_steps(net, optimizer, "topk", every=4)
    good = handle.state_dict()
    for value in (-1, 2**62 + 1, 2**70, True, None, 1.0):
        other = {**good, key: value}
        if key in PERIODS:
            other = {**good, "outer": {**good["outer"], key: value}}
        with pytest.raises(InvalidSetting, match="; "):
            handle.load_state_dict(other)
    handle.detach()


def wrong_shards(good: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sharded state of one rank with one thing wrong, and what that is."""
    data = good["rest"]
    damaged: tuple[Any, ...] = (
        b"",
        b"\xff\xfe",
        data[: len(data) // 2],
        None,
        3,
        "text",
        [],
        {},
    )
    for rest in damaged:
        yield f"rest {rest!r:.20}", {**good, "rest": rest}
    sound = read_packed(io.BytesIO(data))
    for path in places(sound):
        for name in (
            "missing",
            *(name for name in ODDITIES if name not in ("meta", "object")),
        ):
            make = ODDITIES.get(name, lambda: ...)
            other = changed(sound, path, lambda _, make=make: make())
            try:
                rest = packed(other).numpy().tobytes()
            except InvalidSetting:
                continue  # nobody can have saved that
            yield f"{'/'.join(path)} {name}", {**good, "rest": rest}
    for number in (0, -1, 2**40, 2**70):
        for key in ("replicas", "parts"):
            rest = packed({**sound, key: number}).numpy().tobytes()
            yield f"{key} {number}", {**good, "rest": rest}
    for path in places(good["params"]):
        for name, make in ODDITIES.items():
            params = changed(good["params"], path, lambda _, make=make: make())
            yield f"params {'/'.join(path)} {name}", {**good, "params": params}
    for name, make in ODDITIES.items():
        yield f"params {name}", {**good, "params": make()}


def test_a_damaged_sharded_state_is_refused_by_name() -> None:
    handle = gw.attach(nn.Linear(4, 2), "topk")
    good = handle.sharded_state()
    handle.load_state_dict(good)
    for what, wrong in wrong_shards(good):
        _, refusal = outcome(handle.load_state_dict, wrong)
        assert not refusal or "; " in refusal, f"{what}: {refusal}"
    with pytest.raises(InvalidSetting, match="saved_by"):
        handle.sharded_state(saved_by=2**63)
    handle.detach()
