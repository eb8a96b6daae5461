"""The checked arguments of ``attach``, and the parameters that they concern.

Rarely used settings are in two objects with defaults, ``Options`` and
``FailurePolicy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..contract import Compressor, Exchange
from ..contract.bounds import check_whole
from ..contract.compressor import KeywordSettings
from ..contract.registry import KINDS, load, names
from ..contract.spec import DTYPE_NAMES, DTYPES, NamedParam
from ..errors import (
    InvalidSetting,
    UnknownName,
    invalid,
    names_checked,
    with_brackets,
)
from ..exchange.by_name import exchange_for, servers_of
from ..planning.default_fusion import DEFAULT_CHANNELS, matrices
from .engine.backends import BACKENDS
from .grid.shards import ranks_of_each_host
from .step.integrity import DEFAULT_CHECK_EVERY
from .step.refusals import refuse_complex, refuse_grad_dtype
from .transport.wire import Group, meet_in

if TYPE_CHECKING:
    from ..planning.data.cluster import Cluster
    from ..planning.data.plan import Plan
    from .controls import Pilot
    from .liveness.membership import Membership


DEFAULT_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class Options(KeywordSettings):
    """Settings of communication and of traces. Every rank passes the same values.

    Args:
        bucket_cap_mb: The size of a message, in MiB of gradients: a number above 0. A
            message that has reached it takes no further gradient. None (the default):
            each message sends about 4 MiB, in 4 to 16 messages. A message then holds at
            least 1 MiB of gradients, so small models have fewer messages. Larger
            messages pay fewer latencies, and smaller ones start earlier in the backward
            pass. A sparsifier selects the elements of each message by itself.
        num_channels: The number of messages on their way at once, from 1. None (the
            default): 4, or the plan's ``credit``. More messages hide more latency, and
            open more connections.
        compress_if: A function of a parameter's name and the parameter. If it returns
            True, the gradient is compressed, else it is sent uncompressed. By default
            vectors (biases, norms) are sent uncompressed.
        shards: The tensor-parallel process group, or the tensor-parallel dimension of a
            ``DeviceMesh``. Exchanges that need all shards of a layer communicate in it.
            None (the default): each rank holds whole layers, or DTensors.
        backend: The back end between hosts: "gloo", "nccl", or "auto" (the default).
            "auto" measures both, and takes NCCL if it is 1.5 times as fast. The choice
            changes the time of a step, and no result.
        cluster: The ranks and links, as ``gw.Cluster``. In each step the rows of an
            embedding take the collective that is fastest on this cluster. A cluster of
            another number of ranks is scaled to theirs. None (the default): links of
            1 Gbit/s, or the measured links of ``gw.attach(model, "auto")``.
        guard_every: The number of steps between two comparisons, from 1. A comparison
            also sends some gradients uncompressed, and compares both means.
            ``stats()["guard"]`` has the result. None (the default): no comparison.
        trace_steps: The number of last steps that ``handle.trace()`` returns, from 0;
            default 4.

    >>> Options(num_channels=2).bucket_cap_mb is None
    True
    """

    bucket_cap_mb: float | None = None
    num_channels: int | None = None
    compress_if: Callable[[str, Tensor], bool] = matrices
    shards: Group | DeviceMesh | None = None
    backend: str = "auto"
    cluster: Cluster | None = None
    guard_every: int | None = None
    trace_steps: int = 4


@dataclass(frozen=True, kw_only=True)
class FailurePolicy(KeywordSettings):
    """Settings for lost ranks and damaged bits. Every rank passes the same values.

    Args:
        timeout: The longest wait for another rank, a ``timedelta`` above 0; default 5
            minutes. A rank that takes longer counts as lost. A short time-out finds a
            hung rank early, and may take a slow rank for a lost one. It bounds the wait
            for each piece of a payload (about 1 MiB), so a long payload may take more.
        on_failure: What the other ranks do once a rank is lost. "end" (the default):
            all raise ``RankFailed``, and training ends. "shrink": all raise
            ``RanksLost``. The training loop catches it and repeats the step without
            the lost rank. Under local steps with a quorum ranks only warn, and train
            on.
        store: The ``torch.distributed`` store in which ranks meet before they connect.
            It is needed if the default group has no store that all ranks share. All
            ranks pass it at their first attach. None (the default): the store of the
            default group.
        rejoin: The job's store. A new process passes it to join a running job with
            ``on_failure="shrink"``. None (the default): the process starts with the
            job.
        check_every: The number of steps between two comparisons of all ranks'
            parameters, from 1; default 64. If parameters differ, all ranks raise
            ``RankFailed``. A smaller number finds damage earlier and takes longer.
            None: no comparison.
        checksums: Whether each message has a CRC-32. A damaged message then raises
            ``RankFailed``. A checksum takes processor time for each byte. False (the
            default): no checksums.

    >>> FailurePolicy(on_failure="shrink").timeout
    datetime.timedelta(seconds=300)
    """

    timeout: timedelta = DEFAULT_TIMEOUT
    on_failure: str = "end"
    store: Store | None = None
    rejoin: Store | None = None
    check_every: int | None = DEFAULT_CHECK_EVERY
    checksums: bool = False


BOTH: dict[str, Any] = {"options": Options, "failure": FailurePolicy}
"""The two objects by the keyword that takes them."""


def or_defaults(
    options: Options | None, failure: FailurePolicy | None
) -> tuple[Options, FailurePolicy]:
    """The two objects, with defaults in place of None; they are not checked yet."""
    failure = FailurePolicy() if failure is None else failure
    return Options() if options is None else options, failure


_P = ParamSpec("_P")
_T = TypeVar("_T")


def takes_options(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a function refuse a field of the two objects as a keyword.

    The error names the object to pass. For an unknown keyword, the error names the most
    similar argument or field.
    """
    fields = [name for kind in BOTH.values() for name in kind.__dataclass_fields__]

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for keyword, kind in BOTH.items():
            for name in kwargs.keys() & kind.__dataclass_fields__:
                raise InvalidSetting(
                    f"{name}= is a field of gw.{kind.__name__}: write "
                    f"{function.__name__}(..., "
                    f"{keyword}=gw.{kind.__name__}({name}=...))"
                )
        return function(*args, **kwargs)

    return names_checked(checked, fields)


@dataclass(frozen=True)
class Settings:
    """The arguments of ``attach``, as given; ``checked`` refuses unusable ones."""

    exchange: Any
    """An Exchange, a Plan or a Pilot, once it is checked."""
    optimizer: Optimizer | None
    scaler: GradScaler | None
    options: Options
    failure: FailurePolicy
    ranks_per_host: int = 1

    def checked(self, mesh: Any, who: Membership) -> Settings:
        """The same with the exchange resolved; raises ``InvalidSetting``."""
        exchange = resolve(self.exchange)
        ranks_per_host = ranks_of_each_host(mesh, who)
        for name, kind in BOTH.items():
            if not isinstance(value := getattr(self, name), kind):
                raise invalid(
                    name,
                    type(value).__name__,
                    f"a gw.{kind.__name__} or None",
                    f"write gw.{kind.__name__}()",
                )
        settings = {**vars(self), **self.fields}
        for name, (is_right, accepted, remedy) in _ACCEPTED.items():
            if not is_right(value := settings[name]):
                value = (
                    type(value).__name__ if name in ("optimizer", "scaler") else value
                )
                raise invalid(name, value, accepted, remedy)
        for name, remedy in _WHOLE_OR_NONE.items():
            if settings[name] is not None:
                check_whole(name, settings[name], remedy)
        if (known := self.options.cluster) and known.ranks_per_host != ranks_per_host:
            raise invalid(
                "ranks a host of cluster",
                known.ranks_per_host,
                f"{ranks_per_host}, as many as share a host by mesh=",
                "give that",
            )
        return replace(self, exchange=exchange, ranks_per_host=ranks_per_host)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the options and of the failure policy."""
        return {**vars(self.options), **vars(self.failure)}

    @property
    def survives(self) -> bool:
        """Whether ranks go on without lost ranks."""
        return getattr(self.failure, "on_failure", "") == "shrink"

    @property
    def patience(self) -> timedelta:
        """The time-out, or the default if no usable time-out was given."""
        timeout = getattr(self.failure, "timeout", None)
        return timeout if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT

    def choose_store(self) -> None:
        """Makes ranks meet in the given store, if there is one.

        Raises ``InvalidSetting`` if it is no store.
        """
        if (store := getattr(self.failure, "store", None)) is None:
            return
        if not isinstance(store, Store):
            raise invalid(
                "store",
                store,
                "a torch.distributed store or None",
                "write dist.TCPStore(host, port, is_master=rank == 0)",
            )
        meet_in(store)

    @property
    def plan(self) -> Plan | None:
        """The plan that was given in the place of an exchange."""
        return plan_in(self.exchange)

    @property
    def pilot(self) -> Pilot | None:
        """The pilot that was given in the place of an exchange."""
        return pilot_in(self.exchange)

    @property
    def overlaps(self) -> bool:
        """Whether a plan asks that the next forward pass be overlapped."""
        return self.plan is not None and self.plan.overlap_forward

    @property
    def servers(self) -> int:
        """The number of ranks that only aggregate; 0 if all ranks train.

        Raises ``InvalidSetting`` if the messages of a plan name different numbers.
        """
        numbers = {servers_of(exchange) for exchange in exchanges_in(self.exchange)}
        if len(numbers) > 1:
            raise invalid(
                "servers",
                sorted(numbers),
                "the same in all messages of a plan, uncompressed ones too",
                "give each message an exchange by casync_ps with these servers",
            )
        return max(numbers, default=0)

    @property
    def asks_for_messages(self) -> bool:
        """Whether a setting is given that only gradwire's messages obey, not DDP's."""
        options = self.options
        failure = self.failure
        return (
            options.bucket_cap_mb is not None
            or options.num_channels is not None
            or options.backend != "auto"
            or failure.check_every not in (None, DEFAULT_CHECK_EVERY)
            or failure.timeout != DEFAULT_TIMEOUT
            or failure.on_failure != "end"
        )

    @property
    def channels(self) -> int:
        """The number of messages that may be on their way at once."""
        if (plan := self.plan) is not None:
            return min(plan.credit, max(1, len(plan.messages)))
        num_channels = self.options.num_channels
        return DEFAULT_CHANNELS if num_channels is None else num_channels


def _is(
    kind: Any, fits: Callable[[Any], bool] = lambda value: True
) -> Callable[[Any], bool]:
    """A check that a value is of a ``kind``, and ``fits`` unless it is None."""
    return lambda value: isinstance(value, kind) and (value is None or fits(value))


_CAP = _is(int | float | None, lambda value: 0 < value < math.inf)
_SOME = _is(int | None, lambda value: value >= 1)
_COUNT = _is(int, lambda value: value >= 0)
_LASTS = _is(timedelta, lambda value: value > timedelta(0))
_ACCEPTED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "bucket_cap_mb": (_CAP, "a positive number or None", "leave it out"),
    "num_channels": (_SOME, "an integer of at least 1", "write 4"),
    "trace_steps": (_COUNT, "an integer of at least 0", "write 4"),
    "optimizer": (
        _is(Optimizer | None),
        "a torch.optim.Optimizer or None",
        "pass yours",
    ),
    "scaler": (
        _is(GradScaler | None),
        "a torch.amp.GradScaler or None",
        "pass the loss's scaler",
    ),
    "checksums": (_is(bool), "True or False", "leave it out"),
    "on_failure": (
        ("end", "shrink").__contains__,
        "'end' or 'shrink'",
        "write 'shrink' to continue without lost ranks",
    ),
    "backend": (BACKENDS.__contains__, "'auto', 'gloo' or 'nccl'", "leave it out"),
    "cluster": (
        lambda value: getattr(value, "has_rate", value is None),
        "a gw.Cluster whose all-reduce takes longer for more bytes, or None",
        "read a file with gw.Cluster.load",
    ),
    "compress_if": (callable, "a function of name and parameter", "leave it out"),
    "timeout": (_LASTS, "a positive timedelta", "write timedelta(minutes=5)"),
}
"""By setting: a check of its value, the accepted values in words, and the remedy."""
_WHOLE_OR_NONE = {
    "guard_every": "leave it out",
    "check_every": "write None for no checks",
}
"""The remedies for settings that are whole numbers from 1, or None."""


def plan_in(value: object) -> Plan | None:
    """The plan, if the value is one; else None.

    For an exchange, the modules of plans are not loaded.
    """
    if isinstance(value, Exchange):
        return None
    from ..planning.data.plan import Plan

    return value if isinstance(value, Plan) else None


def pilot_in(value: object) -> Pilot | None:
    """The pilot, if the value is one; else None.

    For an exchange, the modules of pilots are not loaded.
    """
    if isinstance(value, Exchange):
        return None
    from .controls import Pilot

    return value if isinstance(value, Pilot) else None


def algorithm(exchange: Exchange | Plan | Pilot) -> str:
    """A text that says which algorithm a saved state is of; other states are refused.

    It names the exchange, or the exchanges of a plan. It names no plan of a pilot: such
    a state can be loaded under any plan, as it is moved there by parameter name.
    """
    if isinstance(exchange, Exchange):
        return repr(exchange)
    texts = sorted({repr(inner) for inner in exchanges_in(exchange)})
    return f"plan of {', '.join(texts)}" if texts else "whatever a pilot chooses"


def exchanges_in(value: object) -> list[Exchange]:
    """An exchange itself, the exchanges that a plan uses, or none for a pilot."""
    if isinstance(value, Exchange):
        return [value]
    if (plan := plan_in(value)) is None:
        return []
    from ..exchange.planned import exchanges_of

    used = {message.exchange for message in plan.messages}
    return [exchange for name, exchange in exchanges_of(plan).items() if name in used]


def resolve(value: Any) -> Exchange | Plan | Pilot:
    """The exchange, the plan or the pilot that a user's argument names.

    ``Path("topk")`` names the algorithm topk, as jsonargparse may turn any text into a
    path, and ``LightningCLI`` uses it.
    """
    match value:
        case Path() if str(value) in _known():
            return resolve(str(value))
        case Path():
            return _plan_of_file(value)
        case str() if value.endswith(".json"):
            return _plan_of_file(value)
        case str():
            return _usable(_named(value))
        case _:
            return _usable(value)


def _known() -> set[str]:
    """The names that ``attach`` takes in place of an exchange."""
    return {*names("compress"), *names("pilot"), *names("planner")}


def _plan_of_file(path: str | Path) -> Plan:
    from ..planning.data.plan import Plan

    return Plan.load(path)


def _named(name: str) -> Any:
    """The compressor, exchange or pilot of a name."""
    known = _known()
    if name not in known:
        for kind in ("compress", "pilot", "planner"):
            KINDS[kind].refuse_elsewhere(name)
        raise UnknownName("compressor, planner or pilot", name, known)
    if name in names("pilot"):
        return load("pilot", name)()
    kinds = ("compress", "collective", "planner")
    match [kind for kind in kinds if name in names(kind)]:
        case ["planner"]:
            return load("pilot", "by_planner")(name)
        case ["compress"]:
            return load("compress", name)()
        case several:
            words = " and of a ".join(KINDS[kind].word for kind in several)
            raise invalid(
                "exchange",
                name,
                f"one algorithm, and this is the name of a {words}",
                f"write gw.plan({name!r}, profile, cluster), or gw.pair(compressor, "
                "collective)",
            )


def _usable(value: Any) -> Exchange | Plan | Pilot:
    """The exchange, the plan or the pilot; a compressor becomes its exchange."""
    match value:
        case Exchange() if value.ranks_per_host != 1:
            raise invalid(
                "exchange",
                value,
                "an exchange without hosts, which attach takes from mesh=",
                "give the exchange inside, and mesh=",
            )
        case Compressor() | Exchange():
            return exchange_for(value)
    plan_or_pilot = plan_in(value) or pilot_in(value)
    if plan_or_pilot is not None:
        return plan_or_pilot
    raise invalid(
        "exchange",
        value,
        "a compressor, an exchange, a plan, the name of a compressor or a planner, "
        "a plan's file, or 'auto'",
        with_brackets(
            value,
            "write gw.attach(model, gw.compress.topk(density=0.01)), make one by "
            "gw.pair, or derive your own from gw.Exchange",
        ),
    )


def trained(model: nn.Module) -> list[NamedParam]:
    """Parameters that require a gradient, in the order in which they are registered.

    A shared parameter is listed once, under its first name.
    """
    inner: nn.Module = model
    ignored: Collection[str] = ()
    if isinstance(model, DistributedDataParallel):
        # Parameters that DDP ignores never come to its hook: a step would wait for
        # them for ever.
        inner = model.module
        ignored = model.parameters_to_ignore
    params: list[NamedParam] = [
        (name, p)
        for name, p in inner.named_parameters()
        if p.requires_grad and name not in ignored
    ]
    if not params:
        raise InvalidSetting(
            "the model has no parameter that requires a gradient; nothing would be "
            "exchanged: attach after requires_grad is set"
        )
    for name, p in params:
        if p.dtype.to_real() not in DTYPES:
            raise invalid(
                f"dtype of parameter {name}",
                p.dtype,
                f"{DTYPE_NAMES}, or complex numbers of these",
                "freeze it",
            )
        refuse_grad_dtype(name, p, getattr(p, "grad_dtype", p.dtype))
    sparse = sparse_weights(inner)
    rows = [param for param in params if id(param[1]) in sparse]
    refuse_complex(
        rows, "for rows (sparse=True)", "build its embedding with sparse=False"
    )
    return params


LEAST_TABLE_BYTES = 2**18
"""The bytes from which the gradient of an embedding's table may be sent as rows.

Then only rows that are not zero are sent, and ranks first announce how many these are.
For a smaller table that takes longer than sending all rows. A step of an LSTM on two
ranks of one machine took 17 ms with a table of 64 KiB as rows, and 10 ms whole.
"""


def tables(model: nn.Module) -> dict[int, int]:
    """The row length of each embedding's table whose dense gradient may be mostly zero.

    The key is the ``id`` of the parameter. Parameters that another kind of module uses
    too, such as the layer before a softmax, are left out. So are tables below
    ``LEAST_TABLE_BYTES``.
    """
    owners: dict[int, list[nn.Module]] = {}
    weights = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), []).append(module)
                weights[id(param)] = param
    return {
        key: weights[key].shape[1]
        for key, modules in owners.items()
        if all(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in modules)
        and not any(module.sparse for module in modules)
        and weights[key].nbytes >= LEAST_TABLE_BYTES
    }


def sparse_weights(model: nn.Module) -> set[int]:
    """Ids of embeddings' parameters with ``sparse=True`` and row-sparse gradients."""
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
