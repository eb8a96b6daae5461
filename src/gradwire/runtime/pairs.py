"""Pairs: the one table of features that do not go together.

A feature is found in an attach's facts. Its value is shown to the user, and is falsy
where the feature is absent. All pairs that are in neither ``REFUSED`` nor ``CAUTIONS``
go together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..contract import Exchange
from ..contract.spec import NamedParam
from ..errors import IncompatiblePair, InvalidSetting, invalid, log
from ..exchange.by_name import momentum_of, named_collective
from ..exchange.error_feedback import Wrapper, chooser_of
from ..exchange.rounds import codec_for_rounds
from .grid.dtensors import has_dtensors, is_dtensor
from .settings import BOTH, Settings, sparse_weights


class Feature(StrEnum):
    """A feature of an attach, by its name in errors and on the page of pairs."""

    PLAN = "a plan"
    PLAN_WITH_OVERLAP = "a plan with overlap"
    BULK = "a plan's bulk"
    AUTO = "auto"
    MOMENTUM_CORRECTION = "momentum correction"
    ADAPT = "adapt"
    LOCAL_STEPS = "local_steps"
    LOCK_STEP = "local_steps without a quorum"
    QUORUM = "quorum"
    JOINT_PAYLOAD = "an exchange that ranks make together"
    REDUCE_SCATTER = "fsdp.reduce_scatter"
    SERVERS = "servers"
    SCALER = "scaler"
    DDP = "DDP"
    DDP_COLLECTIVES = "DDP's own collectives"
    DTENSORS = "DTensors (fully_shard)"
    MESH = "mesh"
    SPARSE_ROWS = "sparse rows"
    SPARSE_DTENSORS = "sparse rows of DTensors"
    FLOAT16 = "scaler, float16 parameters"
    # Settings, by their fields of ``Options`` and ``FailurePolicy``.
    SHARDS = "shards"
    GUARD = "guard_every"
    BACKEND = "backend"
    ON_FAILURE = "on_failure"
    REJOIN = "rejoin"
    CHECK = "check_every"
    CLUSTER = "cluster"
    BUCKET_CAP = "bucket_cap_mb"
    NUM_CHANNELS = "num_channels"
    COMPRESS_IF = "compress_if"
    TRACE_STEPS = "trace_steps"
    CHECKSUMS = "checksums"
    # Only cautions ask for these.
    OVERLAPPING_PLAN = "an overlapping plan"
    NO_OPTIMIZER = "no optimizer"
    MOMENTUM_IN_EXCHANGE = "momentum in the exchange"
    MOMENTUM_IN_OPTIMIZER = "momentum in the optimizer"
    COLLECTIVE_WITHOUT_ROWS = "a collective without rows"
    COMPRESSED_ROWS = "sparse rows that take it"


class Facts(NamedTuple):
    """The facts of an attach in which features are found, and the called function."""

    model: nn.Module
    params: Sequence[NamedParam]
    settings: Settings
    way: str = "attach"
    optimizer: Optimizer | None = None
    """The optimizer that takes the means."""
    quorum: int | None = None
    """The quorum of local steps in partial rounds."""


def _rows(facts: Facts) -> dict[str, Any]:
    """The parameters with row-sparse gradients, by name.

    Local steps have none: they send such parameters whole.
    """
    if facts.way == Feature.LOCAL_STEPS:
        return {}
    sparse = sparse_weights(facts.model)
    return {name: param for name, param in facts.params if id(param) in sparse}


def _sparse_dtensor(facts: Facts) -> str:
    return next((name for name, p in _rows(facts).items() if is_dtensor(p)), "")


def _compressed_rows(facts: Facts) -> str:
    asks = facts.settings.options.compress_if
    return next((name for name, p in _rows(facts).items() if asks(name, p)), "")


def _float16(facts: Facts) -> bool:
    is_half = any(param.dtype == torch.float16 for _, param in facts.params)
    return facts.settings.scaler is not None and is_half


def _momentum_correction(facts: Facts) -> Any:
    """The exchange, if it sends anything other than gradients."""
    exchange = inner = facts.settings.exchange
    while isinstance(inner, Wrapper) and inner.of_gradients:
        inner = inner.inner
    return exchange if isinstance(inner, Wrapper) else None


def _momentum_in_optimizer(facts: Facts) -> str:
    groups = facts.optimizer.param_groups if facts.optimizer is not None else []
    has_momentum = any(
        group.get("momentum") or group.get("betas", (0,))[0] for group in groups
    )
    return type(facts.optimizer).__name__ if has_momentum else ""


def _without_rows(facts: Facts) -> Any:
    named = named_collective(facts.settings.exchange)
    return None if named is None or named.carries_rows else repr(named)


def _no_optimizer(facts: Facts) -> bool:
    is_whole = not isinstance(facts.model, DistributedDataParallel)
    return (
        is_whole and facts.settings.optimizer is None and not has_dtensors(facts.params)
    )


def _ddp_collectives(facts: Facts) -> str:
    """The setting by which a DDP model has collectives of its own in each step."""
    ddp = facts.model
    if not isinstance(ddp, DistributedDataParallel):
        return ""
    settings = {
        "broadcast_buffers": ddp.broadcast_buffers and bool([*ddp.buffers()]),
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
    }
    return next((f"{name}=" for name, is_set in settings.items() if is_set), "")


def _joint_payload(facts: Facts) -> Any:
    """The exchange, if no rank can make its payload alone."""
    exchange = facts.settings.exchange
    if isinstance(exchange, Exchange):
        try:
            codec_for_rounds(exchange)
        except IncompatiblePair:
            return exchange
    return None


def _setting(name: str, default: Any) -> Callable[[Facts], Any]:
    """A field of the options or of the failure policy, where it is not the default."""

    def find(facts: Facts) -> Any:
        value = facts.settings.fields[name]
        return False if value == default else value or repr(value)

    return find


def _ranks_per_host(facts: Facts) -> str:
    number = facts.settings.ranks_per_host
    return f"hosts of {number} ranks" if number > 1 else ""


def _num_shards(facts: Facts) -> int | None:
    given = facts.settings.options.shards
    return given.size() if given is not None and given.size() > 1 else None


FEATURES: dict[str, Callable[[Facts], Any]] = {
    **{
        field.name: _setting(field.name, field.default)
        for kind in BOTH.values()
        for field in fields(kind)
    },
    Feature.PLAN: lambda facts: facts.settings.plan and "a plan",
    Feature.PLAN_WITH_OVERLAP: lambda facts: (
        facts.settings.overlaps and facts.settings.optimizer is not None
    ),
    Feature.BULK: lambda facts: facts.settings.plan and facts.settings.plan.bulk,
    Feature.AUTO: lambda facts: facts.settings.pilot,
    Feature.MOMENTUM_CORRECTION: _momentum_correction,
    Feature.ADAPT: lambda facts: (
        chooser_of(facts.settings.exchange) and facts.settings.exchange
    ),
    Feature.LOCAL_STEPS: lambda facts: facts.way == Feature.LOCAL_STEPS,
    Feature.LOCK_STEP: lambda facts: (
        facts.way == Feature.LOCAL_STEPS and not facts.quorum
    ),
    Feature.QUORUM: lambda facts: facts.quorum,
    Feature.JOINT_PAYLOAD: _joint_payload,
    Feature.REDUCE_SCATTER: lambda facts: facts.way == Feature.REDUCE_SCATTER,
    Feature.SERVERS: lambda facts: facts.settings.servers,
    Feature.SCALER: lambda facts: facts.settings.scaler,
    Feature.DDP: lambda facts: isinstance(facts.model, DistributedDataParallel),
    Feature.DDP_COLLECTIVES: _ddp_collectives,
    Feature.DTENSORS: lambda facts: has_dtensors(facts.params),
    Feature.MESH: _ranks_per_host,
    Feature.SPARSE_ROWS: lambda facts: next(iter(_rows(facts)), ""),
    Feature.SPARSE_DTENSORS: _sparse_dtensor,
    Feature.FLOAT16: _float16,
    Feature.SHARDS: _num_shards,
    Feature.OVERLAPPING_PLAN: lambda facts: facts.settings.overlaps,
    Feature.NO_OPTIMIZER: _no_optimizer,
    Feature.MOMENTUM_IN_EXCHANGE: lambda facts: momentum_of(facts.settings.exchange),
    Feature.MOMENTUM_IN_OPTIMIZER: _momentum_in_optimizer,
    Feature.COLLECTIVE_WITHOUT_ROWS: _without_rows,
    Feature.COMPRESSED_ROWS: _compressed_rows,
}


class RefusedPair(NamedTuple):
    """Two features that do not go together, and the parts of the error's sentence.

    ``what`` names the refused argument, by default the first feature. ``accepted`` says
    which values it may have. Both may contain {first} and {second}, the values of the
    two features. ``given`` is the value that is shown, by default the first feature's.
    """

    first: Feature
    second: Feature
    accepted: str
    remedy: str
    what: str
    given: str

    def error(self, first: Any, second: Any = None) -> InvalidSetting:
        """The error that is raised for these values."""
        values = {"first": first, "second": second}
        what = self.what.format_map(values)
        accepted = self.accepted.format_map(values)
        return invalid(what, self.given or first, accepted, self.remedy)


class Caution(NamedTuple):
    """Two features that go together, and a warning about their joint effect.

    ``text`` is the warning. It may contain {first} and {second}, the features' values.
    """

    first: Feature
    second: Feature
    text: str


REFUSED: list[RefusedPair] = []
"""Every pair that is refused; if an attach has several, the first one is raised."""


def refuse(
    first: Feature,
    second: Feature,
    accepted: str,
    *,
    remedy: str,
    what: str = "",
    given: str = "",
) -> None:
    """Adds a pair to ``REFUSED``."""
    pair = RefusedPair(first, second, accepted, remedy, what or first, given)
    REFUSED.append(pair)


_OUT = "leave it out"
for _name in (
    Feature.SHARDS,
    Feature.GUARD,
    Feature.BACKEND,
    Feature.CHECK,
    Feature.CLUSTER,
):
    for _way in (Feature.LOCAL_STEPS, Feature.REDUCE_SCATTER):
        refuse(
            _name, _way, f"left out under {_way}, which has no use of it", remedy=_OUT
        )
refuse(
    Feature.ON_FAILURE,
    Feature.LOCK_STEP,
    "'end' in lock step, in which all ranks wait for each other",
    remedy="pass quorum= too, with which the others train on",
)
for _name in (
    Feature.ON_FAILURE,
    Feature.REJOIN,
    Feature.BUCKET_CAP,
    Feature.NUM_CHANNELS,
    Feature.TRACE_STEPS,
    Feature.CHECKSUMS,
):
    _why = f"left out under {Feature.REDUCE_SCATTER}, which has no use of it"
    refuse(_name, Feature.REDUCE_SCATTER, _why, remedy=_OUT)
refuse(
    Feature.SHARDS,
    Feature.MESH,
    "None beside mesh=: a layer's shards and hosts of several ranks do not go together",
    remedy="leave one of them out",
)
for _name in (Feature.MESH, Feature.CHECKSUMS):
    _why = f"None beside {_name}, as a coordinator's batches have none"
    refuse(Feature.BULK, _name, _why, remedy="plan without bulk")
refuse(
    Feature.MESH,
    Feature.DTENSORS,
    "None beside parameters that are DTensors",
    remedy="write group=mesh['replicate'], or the sites' dimension under local_steps",
)
for _name in (Feature.BUCKET_CAP, Feature.NUM_CHANNELS, Feature.COMPRESS_IF):
    refuse(_name, Feature.PLAN, "None beside a plan, which decides it", remedy=_OUT)
    refuse(_name, Feature.AUTO, "None beside a plan, which decides it", remedy=_OUT)

_INSTEAD = "attach an exchange, or a plan, instead"
refuse(Feature.SHARDS, Feature.AUTO, "None beside {second}", remedy=_INSTEAD)
refuse(
    Feature.CLUSTER,
    Feature.AUTO,
    "None, as links are measured, beside {second}",
    remedy=_OUT,
)
refuse(
    Feature.DTENSORS,
    Feature.AUTO,
    "one with plain parameters beside {second}",
    remedy=_INSTEAD,
    what="model",
    given="DTensors",
)
refuse(
    Feature.SPARSE_ROWS,
    Feature.AUTO,
    "sparse=False beside {second}",
    remedy=_INSTEAD,
    what="the embedding of {first}",
    given="sparse=True",
)
refuse(
    Feature.FLOAT16,
    Feature.AUTO,
    "None beside {second}",
    remedy="keep parameters in float32 and compute in autocast, or attach 'none' or "
    "'cast16'",
    what="scaler",
    given="one beside parameters in float16",
)

_RESTART = "leave on_failure out, and restart from a checkpoint"
refuse(
    Feature.ON_FAILURE,
    Feature.DDP_COLLECTIVES,
    "'end' beside a DDP model with {second}, by which DDP itself waits for lost ranks",
    remedy="make it without, or attach its module",
)
refuse(
    Feature.ON_FAILURE,
    Feature.SHARDS,
    "'end' beside shards=, since a lost rank holds some",
    remedy=_RESTART,
)
refuse(
    Feature.ON_FAILURE,
    Feature.AUTO,
    "'end' beside {second}, whose plan is for all ranks",
    remedy=_RESTART,
)
refuse(
    Feature.ON_FAILURE,
    Feature.PLAN_WITH_OVERLAP,
    "'end' beside a plan that overlaps the next forward pass: its updates cannot be "
    "undone",
    remedy=_RESTART,
)
refuse(
    Feature.SPARSE_DTENSORS,
    Feature.DTENSORS,
    "sparse=False, as torch cuts no rows of gradients",
    remedy="make the embedding with sparse=False",
    what="the embedding of {first}",
    given="sparse=True",
)
refuse(
    Feature.ADAPT,
    Feature.MESH,
    "one with fixed settings: a rank of a host knows only its own tensors' losses",
    remedy="attach it without mesh=, or leave adapt out",
    what="exchange among hosts of several ranks",
)
refuse(
    Feature.MOMENTUM_CORRECTION,
    Feature.GUARD,
    "an exchange of gradients, since means of momentum cannot be compared",
    remedy="leave guard_every out",
    what="exchange beside guard_every",
)
for _name in (Feature.PLAN, Feature.AUTO):
    refuse(
        _name,
        Feature.LOCAL_STEPS,
        "a compressor or an exchange, as plans follow the backward pass",
        remedy="give the exchange itself, compress_if= and delay=",
        what="exchange",
    )
refuse(
    Feature.DTENSORS,
    Feature.QUORUM,
    "one with plain parameters beside quorum=: the shards of an island would close "
    "rounds with other sites",
    remedy="leave quorum= out, so that sites exchange in lock step",
    what="model",
    given="one with DTensors",
)
for _name in (
    Feature.BUCKET_CAP,
    Feature.NUM_CHANNELS,
    Feature.COMPRESS_IF,
    Feature.CHECKSUMS,
):
    _why = "left out beside quorum=, which sends whole fragments in one payload"
    refuse(_name, Feature.QUORUM, _why, remedy=_OUT)
refuse(
    Feature.JOINT_PAYLOAD,
    Feature.QUORUM,
    "one whose payload a rank can make alone, beside quorum=",
    remedy="take a compressor such as topk or uniform",
    what="exchange",
)
refuse(
    Feature.MESH,
    Feature.QUORUM,
    "None beside quorum=: each rank pushes alone",
    remedy="leave one of them out",
)
for _name in (
    Feature.LOCAL_STEPS,
    Feature.ADAPT,
    Feature.DDP,
    Feature.DTENSORS,
    Feature.MESH,
    Feature.SHARDS,
    Feature.SPARSE_ROWS,
    Feature.SCALER,
    Feature.GUARD,
    Feature.ON_FAILURE,
):
    _why = f"None beside {_name}, which needs a model on each rank"
    refuse(Feature.SERVERS, _name, _why, remedy="let each rank train")

_NOT_OVERLAPPED = (
    "the plan asks to overlap the next forward pass, and this run does not: "
)
CAUTIONS = [
    Caution(
        Feature.OVERLAPPING_PLAN,
        Feature.DDP,
        f"{_NOT_OVERLAPPED}DDP's backward() waits for all gradients; attach the plain "
        "module to overlap it",
    ),
    Caution(
        Feature.OVERLAPPING_PLAN,
        Feature.DTENSORS,
        f"{_NOT_OVERLAPPED}parameters are DTensors, whose forward pass torch itself "
        "arranges",
    ),
    Caution(
        Feature.OVERLAPPING_PLAN,
        Feature.NO_OPTIMIZER,
        f"{_NOT_OVERLAPPED}attach got no optimizer=, whose step it would have to cut",
    ),
    Caution(
        Feature.MOMENTUM_IN_EXCHANGE,
        Feature.MOMENTUM_IN_OPTIMIZER,
        "momentum counts twice: the exchange corrects for a momentum of {first}, and "
        "{second} has its own; use torch.optim.SGD(params, lr=...) without momentum",
    ),
    Caution(
        Feature.MOMENTUM_IN_EXCHANGE,
        Feature.SPARSE_ROWS,
        "row-sparse gradients get no momentum from the exchange ({second}, ...); make "
        "the embedding with sparse=False, or give its weights an optimizer with "
        "momentum",
    ),
    Caution(
        Feature.COLLECTIVE_WITHOUT_ROWS,
        Feature.COMPRESSED_ROWS,
        "row-sparse gradients ({second}, ...) cannot take {first}, and are gathered, "
        "or sent to the ranks that serve them, whichever takes less time in a step; "
        "make the embedding with sparse=False to have its gradient take it, or name a "
        "collective of rows, as zen",
    ),
]
"""Every pair that works with a warning."""

_Pair = TypeVar("_Pair", RefusedPair, Caution)


def _present(pairs: Sequence[_Pair], facts: Facts) -> Iterator[tuple[_Pair, Any, Any]]:
    """The pairs whose two features are both present, with the features' values."""
    values = {name: find(facts) for name, find in FEATURES.items()}
    for pair in pairs:
        if values[pair.first] and values[pair.second]:
            yield pair, values[pair.first], values[pair.second]


def refuse_pairs(facts: Facts) -> None:
    """Raises ``InvalidSetting`` for two features that do not go together."""
    for pair, first, second in _present(REFUSED, facts):
        raise pair.error(first, second)


def warn_of_pairs(facts: Facts) -> None:
    """Warns of pairs of features that work, but hardly as the user expects."""
    for pair, first, second in _present(CAUTIONS, facts):
        log.warning("%s", pair.text.format(first=first, second=second))


def refusal_of(first: Feature, second: Feature) -> RefusedPair:
    """The refusal of a pair, for checks where an attach has no facts yet."""
    return next(
        refusal
        for refusal in REFUSED
        if (refusal.first, refusal.second) == (first, second)
    )
