"""Options and FailurePolicy: what is rarely set of an attach, in two objects with defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from ...errors import InvalidSetting
from ...planning.default_fusion import matrices
from ..failure.integrity import DEFAULT_CHECK_EVERY
from ..step.wire import Group

if TYPE_CHECKING:
    from ...planning.data.cluster import Cluster

DEFAULT_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of communication and of traces. Every rank passes the same values.

    >>> Options(num_channels=2).bucket_cap_mb is None
    True
    """

    bucket_cap_mb: float | None = None
    """The size of a message in MiB. None: large enough that its payload pays its latency."""
    num_channels: int | None = None
    """The number of messages on their way at once. None: 4, or what the plan says."""
    compress_if: Callable[[str, Tensor], bool] = matrices
    """A function of a parameter and its name. True: the exchange sends the gradient. False: the
    gradient is sent uncompressed. By default vectors (biases, norms) are sent uncompressed."""
    shards: Group | DeviceMesh | None = None
    """The tensor-parallel process group, or the tensor-parallel dimension of a mesh. Exchanges that
    need all shards of a layer communicate in it."""
    backend: str = "auto"
    """The back end between hosts: "gloo", "nccl", or "auto", which measures both."""
    cluster: Cluster | None = None
    """The ranks and links, for embeddings whose rows take in each step the fastest collective. A
    cluster of another number of ranks is scaled. None: links of 1 Gbit/s; ``"auto"`` measures."""
    guard_every: int | None = None
    """Steps between two comparisons of some compressed means with uncompressed means. The result is
    in ``stats()["guard"]``. None: no comparison."""
    trace_steps: int = 4
    """The number of last steps that ``handle.trace()`` has."""


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """Settings for lost ranks and damaged bits. Every rank passes the same values.

    >>> FailurePolicy(on_failure="shrink").timeout
    datetime.timedelta(seconds=300)
    """

    timeout: timedelta = DEFAULT_TIMEOUT
    """The longest wait for another rank; 5 minutes by default."""
    on_failure: str = "end"
    """``"end"``: all other ranks raise ``RankFailed``, and training ends. ``"shrink"``: they raise
    ``RanksLost``, repeat the step and continue."""
    rejoin: Store | None = None
    """The job's store, in a new process that joins a job with ``on_failure="shrink"``."""
    check_every: int | None = DEFAULT_CHECK_EVERY
    """Steps between two comparisons of all ranks' parameters, by default 64; None: none."""
    checksums: bool = False
    """True: each message has a CRC-32, and a damaged message raises ``RankFailed``."""


BOTH: dict[str, Any] = {"options": Options, "failure": FailurePolicy}
"""The two objects by the keyword that takes them."""


def or_defaults(
    options: Options | None, failure: FailurePolicy | None
) -> tuple[Options, FailurePolicy]:
    """The two objects, made where they are None; other values are refused where all are checked."""
    return (
        Options() if options is None else options,
        FailurePolicy() if failure is None else failure,
    )


_P = ParamSpec("_P")
_T = TypeVar("_T")


def takes_options(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Has a function refuse fields of the two objects as keywords, and say where they belong."""

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for keyword, kind in BOTH.items():
            for name in kwargs.keys() & kind.__dataclass_fields__:
                raise InvalidSetting(
                    f"{name}= is a field of gw.{kind.__name__}: write "
                    f"{function.__name__}(..., {keyword}=gw.{kind.__name__}({name}=...))"
                )
        return function(*args, **kwargs)

    return checked
