"""Any valid plan trains exactly what the same exchange trains without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

import gradwire as gw
from gradwire.errors import InvalidSetting, RankFailed
from gradwire.exchange.error_feedback import tensor_encoder
from gradwire.exchange.planned import exchanges_of, planned_spec
from gradwire.planning.data.check import check
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.runtime.step.messages import Message
from gradwire_lab.compress.selective import selective
from gradwire_lab.planner.ssfusion import VARIANTS, ssfusion
from tests.each import each, few
from tests.runtime import plans
from tests.runtime.models import Branches
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net, ddp, digest, loss_of, train

pytestmark = pytest.mark.multi

NUM_STEPS = 4


def _grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of other settings: matrices decay, vectors learn faster."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.02},
    ]


Made = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "momentum": lambda model: SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01
    ),
    "adam": lambda model: Adam(model.parameters(), lr=3e-3),
    "adamw, groups": lambda model: AdamW(_grouped(model), lr=3e-3),
}


def trained_by(rank: int, made: str, chosen: Any, *, wrapped: bool = False) -> str:
    """The bits of a model after a few steps through ``chosen``."""
    net = Net()
    model = ddp(net) if wrapped else net
    optimizer = OPTIMIZERS[made](net)
    handle = gw.attach(model, chosen, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(NUM_STEPS):
        train(model, optimizer, rank, [step])
        scheduler.step()
    stats = handle.stats()
    handle.detach()
    overlaps = isinstance(chosen, Plan) and chosen.overlap_forward and not wrapped
    # The last step is overlapped by nothing; detach settles it.
    assert stats["overlapped_steps"] == (NUM_STEPS - 1 if overlaps else 0), stats
    assert stats["fallbacks"] == {}
    assert stats["averaged_by"] == "gradwire" or not isinstance(chosen, Plan)
    return digest(net)


def with_and_without(rank: int, world: int, made: str) -> tuple[str, dict[str, str]]:
    """Two ranks: a sum of two numbers is the same in any order, so any exchange will
    do.
    """
    without = trained_by(rank, made, DENSE)
    return without, {
        p.planner + str(p.settings): trained_by(rank, made, p) for p in plans.every()
    }


@pytest.mark.slow
def test_any_plan_trains_the_same_bits(two: Ranks) -> None:
    for without, by_plan in two.run(with_and_without, "adamw, groups", timeout_s=100):
        assert len(by_plan) > 10
        assert {
            name: bits == without for name, bits in by_plan.items()
        } == dict.fromkeys(by_plan, True)


def under_ddp(rank: int, world: int, plan: Plan) -> list[str]:
    """The bits without a plan, by one, and by one that sends a message otherwise."""
    first = plan.messages[0].model_copy(update={"exchange": "lossy"})
    lossy = ExchangeSetting(compressor="cast16", collective="allreduce")
    update = {"messages": (first, *plan.messages[1:]), "exchanges": {"lossy": lossy}}
    every = (DENSE, plan, plan.model_copy(update=update))
    return [trained_by(rank, "momentum", one, wrapped=True) for one in every]


@few("seed", [0, 1])
def test_plans_under_ddp_train_the_bits_of_training_without_one(
    seed: int, two: Ranks
) -> None:
    for without, by_plan, lossy in two.run(under_ddp, plans.drawn(seed)):
        assert by_plan == without != lossy


LOSSY = ExchangeSetting(
    compressor="topk",
    settings={"density": 0.2},
    collective="allgather_sparse",
    error_feedback=True,
)


ONEBIT = ExchangeSetting(
    compressor="onebit", collective="casync_ps", error_feedback=True
)


def resumed(rank: int, world: int, plan: Plan) -> tuple[str, str, str]:
    """A run that is interrupted, saved and resumed under another order of the same
    blocks.
    """

    def run(steps: Iterable[int], net: Net, state: Any = None) -> Any:
        optimizer = OPTIMIZERS["momentum"](net)
        handle = gw.attach(net, plan)
        if state is not None:
            optimizer.load_state_dict(state["optimizer"])
            handle.load_state_dict(state["handle"])
        train(net, optimizer, rank, steps)
        residuals = handle.residuals()
        assert sum(float(one.abs().sum()) for one in residuals.values()) > 0
        found = {"optimizer": optimizer.state_dict(), "handle": handle.state_dict()}
        handle.detach()
        optimizer.zero_grad()
        params = dict(net.named_parameters())
        assert all(
            one.numel() == params[name].numel() for name, one in residuals.items()
        )
        return found

    whole, parts = Net(), Net()
    run(range(4), whole)
    state = run(range(2), parts)
    names = dict(parts.named_parameters())
    for name, fields in state["handle"]["params"].items():
        assert all(one.numel() == names[name].numel() for one in fields.values())
    run(range(2, 4), parts, state)
    return digest(whole), digest(parts), str(state["handle"]["algorithm"])


def test_state_of_cut_parameters_is_saved_by_name(two: Ranks) -> None:
    plan = plans.in_turn(plans.drawn(2), {"topk": LOSSY, "onebit": ONEBIT})
    for whole, parts, algorithm in two.run(resumed, plan):
        assert parts == whole
        assert "topk" in algorithm


def refused(plan: Plan, model: nn.Module) -> str:
    with pytest.raises(InvalidSetting) as caught:
        gw.attach(model, plan)
    return str(caught.value)


def test_plans_that_cannot_be_carried_out_are_refused() -> None:
    plan = plans.drawn(0)
    other = nn.Linear(3, 3)
    assert "'weight' elements 0:9 are in no message" in refused(
        plan.model_copy(update={"messages": ()}), other
    )
    assert "unknown tensor" in refused(plan, other)


def test_a_plan_is_attached_from_its_file(tmp_path: Path) -> None:
    plan = plans.drawn(3)
    plan.save(tmp_path / "plan.json")
    for given in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        handle = gw.attach(Net(), given)
        assert handle.exchange == plan
        assert len(handle._synchroniser.messages) == len(plan.messages)
        handle.detach()


def channels_last(rank: int, world: int, wrapped: bool) -> bool:
    """A cut parameter with strides of its own."""
    conv, whole = (
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)
    )
    whole.load_state_dict(conv.state_dict())
    profile = plans.profile_of_model(nn.Sequential(conv))
    layer = profile.layers[0].model_copy(
        update={
            "tensors": tuple(
                t.model_copy(update={"name": t.name.partition(".")[2]})
                for t in profile.layers[0].tensors
            )
        }
    )
    profile = profile.model_copy(update={"layers": (layer,)})
    plan = gw.planner.bytescheduler(profile, plans.CLUSTER, partition_bytes=64)
    cut = ddp(conv) if wrapped else conv
    gw.attach(cut, plan)
    gw.attach(whole, DENSE)
    torch.manual_seed(rank)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for model in (cut, whole):
        model(x).square().sum().backward()
    return all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(conv.parameters(), whole.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    )


@each("wrapped", [False, True])
def test_gradients_keep_strides_of_their_own(wrapped: bool, two: Ranks) -> None:
    assert two.run(channels_last, wrapped) == [True, True]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.other = (nn.Linear(4, 4) for _ in range(3))


def another_head(rank: int, world: int) -> str:
    """A backward pass that raised is followed by one that begins with other
    parameters.
    """
    model = TwoHeads()
    gw.attach(model, DENSE)

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    hidden = model.body(torch.ones(2, 4))
    hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model.one(hidden).sum().backward()
    with pytest.raises(RankFailed) as caught:
        model.other(model.body(torch.ones(2, 4))).sum().backward()
    return str(caught.value)


def test_a_broken_backward_is_noticed_wherever_the_next_one_begins(
    doomed_two: Ranks,
) -> None:
    for text in doomed_two.run(another_head):
        assert "an earlier backward pass that raised before its end" in text


def two_models(rank: int, world: int, overlap: bool) -> str:
    """Two attached models share an optimizer, which one of them must not let run
    ahead.
    """
    torch.manual_seed(0)
    first, second = nn.Linear(30, 30), nn.Linear(30, 30)
    optimizer = SGD([*first.parameters(), *second.parameters()], lr=0.1)
    handles = []
    for model in (first, second):
        profile = plans.profile_of_model(nn.ModuleList([model]))
        plan = gw.planner.bytescheduler(
            _unprefixed(profile), plans.CLUSTER, partition_bytes=400
        )
        given = optimizer if overlap else None
        handles.append(
            gw.attach(
                model,
                plan.model_copy(update={"overlap_forward": overlap}),
                optimizer=given,
            )
        )
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        second(first(torch.randn(2, 30))).square().sum().backward()
        optimizer.step()
    for handle in handles:
        handle.detach()
    return digest([*first.parameters(), *second.parameters()])


def _unprefixed(profile: Profile) -> Profile:
    """Layers of a lone module, whose tensors have no prefix."""
    text = profile.to_json().replace('"0.', '"')
    return Profile.parse(text)


def test_two_models_of_one_optimizer_train_the_same_with_overlap(two: Ranks) -> None:
    plain, overlapped = two.run(two_models, False), two.run(two_models, True)
    assert len({*plain, *overlapped}) == 1


def test_many_channels_and_long_chains_need_few_threads() -> None:
    """A thousand messages that all wait for one: neither threads nor stack are as
    many.
    """
    layer = Layer(
        name="all",
        tensors=(
            ProfiledTensor(name="weight", shape=(40, 50)),
            ProfiledTensor(name="bias", shape=(40,)),
        ),
        forward_s=0.0,
        backward_s=0.0,
    )
    profile = Profile(model="Linear", source="by hand", batch_size=1, layers=(layer,))
    plan = gw.planner.bytescheduler(profile, plans.CLUSTER, partition_bytes=8, credit=3)
    assert len(plan.messages) > 1000
    waiting = [m.model_copy(update={"after": (0,)}) for m in plan.messages[1:]]
    plan = plan.model_copy(update={"messages": (plan.messages[0], *waiting)})
    model = nn.Linear(50, 40)
    handle = gw.attach(model, plan)
    x = torch.randn(3, 50)
    model(x).sum().backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, x.sum(0).expand(40, 50))
    handle.detach()


# ---- Plans end in the same bits wherever they have gradients encoded -----------------


Lanes = dict[str, set[str]]
"""The lanes on which tensors were encoded before their message's launch, by the
tensor's name.
"""


def _named(plan: Plan, profile: Profile, message: PlannedMessage) -> list[str]:
    """The tensors of a message that its exchange encodes each by itself, in the
    message's order.
    """
    tensors = {t.name: t for layer in profile.layers for t in layer.tensors}
    encoder = tensor_encoder(exchanges_of(plan)[message.exchange])
    spec = planned_spec(message, tensors, is_shaped=True)
    places = () if encoder is None else encoder.apart(spec)
    return [message.chunks[place].tensor for place in places]


def _at_launch(names: list[str]) -> dict[str, Any]:
    return {"inline": (), "early": ()}


FORMS: tuple[Callable[[list[str]], dict[str, Any]], ...] = (
    _at_launch,
    lambda names: {"inline": tuple(names), "early": ()},
    lambda names: {"inline": (), "early": tuple(names)},
    lambda names: {"inline": tuple(names[::2]), "early": tuple(names[1::2])},
)


def _encoded(
    plan: Plan, profile: Profile, form: Callable[[list[str]], dict[str, Any]]
) -> Plan:
    """The plan with every tensor that is encoded by itself encoded in one form."""
    messages = tuple(
        one.model_copy(update=form(_named(plan, profile, one))) for one in plan.messages
    )
    found = plan.model_copy(update={"messages": messages})
    check(found, profile)
    return found


class Case(NamedTuple):
    """A training, and the plan that it has: drawn from a seed, through ``selective``.

    Plans of odd seeds overlap the next forward pass.
    """

    seed: int
    sparsifier: str = "dgc"
    num_dense: int = 0
    feedback: bool = True
    unused: bool = False
    wrapped: bool = False
    scale: float = 1.0
    accumulate: bool = False

    def model(self, rank: int) -> nn.Module:
        if not self.unused:
            return Net()
        # Step 0: only rank 0 has left, and none has right in steps 1 and 2.
        return Branches(lambda step: (step > 0 or rank == 0, step not in (1, 2)))

    def plan(self, profile: Profile) -> Plan:
        settings = {
            "sparsifier": self.sparsifier,
            "density": 0.2,
            "num_dense": self.num_dense,
        }
        setting = ExchangeSetting(
            compressor="selective", settings=settings, error_feedback=self.feedback
        )
        model = self.model(0)
        return plans.through(
            plans.drawn(self.seed, model=model, cuts=0), "selective", setting
        )


def trained(rank: int, case: Case, plan: Plan) -> tuple[str, str, Lanes]:
    """The bits of the model and of its residuals after some steps, and where it was
    encoded.
    """
    net = case.model(rank)
    model = ddp(net, broadcast_buffers=False) if case.wrapped else net
    optimizer = OPTIMIZERS["adam"](net)
    scaler = GradScaler(
        "cpu", init_scale=case.scale, growth_interval=2, enabled=case.scale != 1
    )
    given = scaler if case.scale != 1 else None
    handle = gw.attach(model, plan, optimizer=optimizer, scaler=given)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with ExitStack() as stack:
            if case.accumulate:
                stack.enter_context(handle.no_sync())
                scaler.scale(loss_of(model, rank, 100 + step)).backward()
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    lanes: Lanes = {}
    for span in handle.trace().spans:
        if span.name.startswith("encode "):
            lanes.setdefault(span.name.removeprefix("encode "), set()).add(span.lane)
    residuals = digest(handle.residuals().values())
    within = any("backward" in of_tensor for of_tensor in lanes.values())
    assert within == (handle.stats()["inline_s_per_step"] > 0)
    handle.detach()
    return digest(net), residuals, lanes


def in_all_forms(rank: int, world: int, case: Case) -> list[tuple[str, str, Lanes]]:
    profile = plans.profile_of_model(case.model(rank))
    plan = case.plan(profile)
    return [trained(rank, case, _encoded(plan, profile, form)) for form in FORMS]


CASES = {
    "overlap": Case(1),
    "topk, no feedback": Case(2, "topk", num_dense=1, feedback=False),
    "redsync": Case(4, "redsync", num_dense=1),
    "unused, overlap": Case(5, unused=True),
    "scaler, accumulation, overlap": Case(7, scale=2.0**10, accumulate=True),
    "unused, scaler, accumulation": Case(
        10, unused=True, scale=2.0**10, accumulate=True
    ),
    "ddp": Case(12, wrapped=True),
}


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("redsync", "unused, overlap", "ddp")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def test_the_bits_are_the_same_wherever_tensors_are_encoded(
    name: str, two: Ranks
) -> None:
    case = CASES[name]
    profile = plans.profile_of_model(case.model(0))
    plan = case.plan(profile)
    names = {name for one in plan.messages for name in _named(plan, profile, one)}
    for at_launch, inline, early, both in two.run(in_all_forms, case):
        assert at_launch[:2] == inline[:2] == early[:2] == both[:2]
        assert at_launch[2] == {}
        assert inline[2] == {name: {"backward"} for name in names}
        assert early[2] == {name: {"compute"} for name in names}
        assert set(both[2]) == names


def whole_messages(rank: int, world: int, seed: int) -> list[tuple[str, set[str]]]:
    """The bits after a few steps of messages that are encoded as one, and the lanes
    that did it.
    """
    found = []
    plan = plans.through(plans.drawn(seed), "lossy", LOSSY)
    for is_inline in (False, True):
        messages = tuple(
            one.model_copy(
                update={
                    "inline": tuple({c.tensor: 0 for c in one.chunks})
                    if is_inline
                    else ()
                }
            )
            for one in plan.messages
        )
        net = Net()
        optimizer = OPTIMIZERS["momentum"](net)
        chosen = plan.model_copy(update={"messages": messages})
        handle = gw.attach(net, chosen, optimizer=optimizer)
        train(net, optimizer, rank, range(NUM_STEPS))
        lanes = {span.lane for span in handle.trace().spans if span.name == "encode"}
        handle.detach()
        found.append((digest(net), lanes))
    return found


@each("seed", [0, 1])
def test_whole_messages_may_be_encoded_inline(seed: int, two: Ranks) -> None:
    """Within the backward pass (with ``overlap_forward`` too, seed 1) or on the compute
    lane.
    """
    for (beside, lanes), (within, inline_lanes) in two.run(whole_messages, seed):
        assert within == beside
        assert (lanes, inline_lanes) == ({"compute"}, {"backward"})


def by_variant(rank: int, world: int) -> list[str]:
    """The bits after a few steps of each variant of ssfusion, as planned and at the
    launch.
    """
    profile = plans.profile_of_model(Net())
    found = []
    for variant in VARIANTS:
        plan = ssfusion(profile, plans.CLUSTER, variant=variant, density=0.3, floor=0.1)
        assert any(one.inline for one in plan.messages)
        assert any(one.early for one in plan.messages) == ("o" in variant)
        plain = plan.model_copy(
            update={
                "messages": tuple(
                    one.model_copy(update=_at_launch([])) for one in plan.messages
                )
            }
        )
        for chosen in (plan, plain):
            net = Net()
            optimizer = OPTIMIZERS["momentum"](net)
            handle = gw.attach(net, chosen, optimizer=optimizer)
            train(net, optimizer, rank, range(NUM_STEPS))
            handle.detach()
            found.append(digest(net))
    return found


@pytest.mark.slow
def test_every_variant_of_ssfusion_is_carried_out(two: Ranks) -> None:
    for bits in two.run(by_variant):
        planned, plain = bits[::2], bits[1::2]
        assert planned == plain


def alone(rank: int, world: int) -> tuple[str, str, Lanes]:
    case = Case(1)
    profile = plans.profile_of_model(Net())
    early, _, lanes = trained(
        rank, case, _encoded(case.plan(profile), profile, FORMS[2])
    )
    net = Net()
    optimizer = OPTIMIZERS["adam"](net)
    train(net, optimizer, rank, range(NUM_STEPS))
    return early, digest(net), lanes


def test_a_rank_that_is_alone_encodes_nothing(one: Ranks) -> None:
    for early, plain, lanes in one.run(alone):
        assert early == plain
        assert lanes == {}


# ---- what goes wrong -----------------------------------------------------------------


def raise_in_an_encode(rank: int, world: int, form: int) -> tuple[str, Any, str]:
    case = Case(0)
    net, profile = Net(), plans.profile_of_model(Net())
    handle = gw.attach(net, _encoded(case.plan(profile), profile, FORMS[form]))
    optimizer = OPTIMIZERS["momentum"](net)
    train(net, optimizer, rank, range(2))
    if rank == 1:
        message = handle._synchroniser.messages[-1]
        assert isinstance(message, Message)
        message._places = {}
    with pytest.raises(Exception) as raised:  # noqa: PT011
        train(net, optimizer, rank, range(2, 5))
    return (
        type(raised.value).__name__,
        getattr(raised.value, "ranks", None),
        str(raised.value),
    )


def torn(rank: int, world: int) -> tuple[str, str]:
    """A backward pass that raises when some tensors are encoded already: what was taken
    is lost.

    So the step can neither be saved nor repeated.
    """
    case = Case(0)
    net, profile = Net(), plans.profile_of_model(Net())
    handle = gw.attach(net, _encoded(case.plan(profile), profile, FORMS[2]))
    optimizer = OPTIMIZERS["momentum"](net)
    train(net, optimizer, rank, range(2))

    def fail(grad: Tensor) -> None:
        raise ValueError("no such loss")

    hook = net.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="no such loss"):
        loss_of(net, rank, 2).backward()
    hook.remove()
    with pytest.raises(InvalidSetting) as refusal:
        handle.state_dict()
    with pytest.raises(Exception) as raised:  # noqa: PT011
        loss_of(net, rank, 3).backward()
    return str(refusal.value), str(raised.value)


def test_an_error_in_an_encode_reaches_all_ranks(doomed_two: Ranks) -> None:
    """It reaches all ranks; and a step that broke off is neither saved nor repeated."""
    for form in (1, 2):  # inline, early
        other, own = doomed_two.run(raise_in_an_encode, form)
        assert own[:2] == ("KeyError", None)
        assert other[:2] == ("RankFailed", (1,))
        assert "rank 1 of 2 raised KeyError" in other[2]
        assert "step 2 " in other[2]
    for saving, repeating in doomed_two.run(torn):
        assert "after a backward pass that raised before its end" in saving
        assert (
            "came after an earlier backward pass that raised before its end"
            in repeating
        )


def _plan_of(setting: ExchangeSetting, **where: tuple[str, ...]) -> Plan:
    """All of a linear layer in one message, some of it encoded somewhere."""
    chunks = tuple(
        Chunk(tensor=name, start=0, stop=param.numel())
        for name, param in nn.Linear(3, 3).named_parameters()
    )
    message = PlannedMessage(chunks=chunks, exchange="it", **where)
    exchanges = {"it": setting}
    return Plan(
        planner="by hand", model="Linear", messages=(message,), exchanges=exchanges
    )


@each(
    "setting, where, words",
    [
        (LOSSY, {"early": ("weight", "bias")}, "'weight' cannot be encoded early"),
        (LOSSY, {"inline": ("weight",)}, "is encoded as one"),
        (
            ExchangeSetting(
                compressor="selective", settings={"sparsifier": "dgc", "num_dense": 1}
            ),
            {"early": ("weight", "bias")},
            "'bias' is to be encoded by itself, and selective does not encode it so",
        ),
        (
            ExchangeSetting(
                compressor="selective", settings={"sparsifier": "dgc", "num_dense": 0}
            ),
            {"early": ("weight",)},
            "'bias' is encoded by itself, and named neither inline nor early",
        ),
        (
            ExchangeSetting(compressor="selective", settings={"num_dense": 1}),
            {"inline": ("weight", "bias")},
            "'bias' is to be encoded by itself, and selective does not encode it so",
        ),
    ],
    ids=[
        "early as one",
        "inline in part",
        "sent dense",
        "left out",
        "sparsifier by default",
    ],
)
def test_encodes_that_cannot_be_done_there_are_refused(
    setting: ExchangeSetting, where: dict[str, tuple[str, ...]], words: str
) -> None:
    assert words in refused(_plan_of(setting, **where), nn.Linear(3, 3))


def test_only_sparse_tensors_are_encoded_apart() -> None:
    spec = gw.TensorSpec("message", 15, shapes=((2, 5), (), (4,)))
    exchange = selective(num_dense=1)
    assert exchange.apart(spec) == (0, 2)
    kept = gw.with_error_feedback(exchange)
    assert tensor_encoder(kept) is exchange
    assert tensor_encoder(gw.with_clipping(kept, 1.0)) is None
    pair = gw.pair(gw.compress.topk(), gw.collective.allgather_sparse())
    assert tensor_encoder(pair) is None
