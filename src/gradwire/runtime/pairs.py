"""Pairs: the one table of features that do not go together.

A feature is a function of an attach's facts. Its value is shown to the user, and is
falsy where the feature is absent. All pairs that are in neither ``REFUSED`` nor
``CAUTIONS`` go together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..contract.spec import NamedParam
from ..errors import InvalidSetting, invalid
from ..exchange.by_name import momentum_of, named_collective
from ..exchange.error_feedback import Wrapper, chooser_of
from .grid.dtensors import has_dtensors, is_dtensor
from .settings import BOTH, Settings, sparse_weights

_log = logging.getLogger("gradwire")
LOCAL = "local_steps"
REDUCE_SCATTER = "fsdp.reduce_scatter"


class Facts(NamedTuple):
    """The facts of an attach in which features are found, and the called function."""

    model: nn.Module
    params: Sequence[NamedParam]
    settings: Settings
    way: str = "attach"
    optimizer: Optimizer | None = None
    """The optimizer that takes the means."""


def _rows(facts: Facts) -> list[str]:
    """Names of the parameters with row-sparse gradients.

    Local steps send those whole.
    """
    sparse = set() if facts.way == LOCAL else sparse_weights(facts.model)
    return [name for name, param in facts.params if id(param) in sparse]


def _rows_asked(facts: Facts) -> str:
    params = dict(facts.params)
    asks = facts.settings.options.compress_if
    return next((name for name in _rows(facts) if asks(name, params[name])), "")


def _half(facts: Facts) -> bool:
    is_half = any(param.dtype == torch.float16 for _, param in facts.params)
    return facts.settings.scaler is not None and is_half


def _no_gradients(facts: Facts) -> Any:
    exchange = inner = facts.settings.exchange
    while isinstance(inner, Wrapper) and inner.of_gradients:
        inner = inner.inner
    return exchange if isinstance(inner, Wrapper) else None


def _twice(facts: Facts) -> str:
    groups = facts.optimizer.param_groups if facts.optimizer is not None else []
    has_momentum = any(
        one.get("momentum") or one.get("betas", (0,))[0] for one in groups
    )
    return type(facts.optimizer).__name__ if has_momentum else ""


def _without_rows(facts: Facts) -> Any:
    named = named_collective(facts.settings.exchange)
    return None if named is None or named.carries_rows else repr(named)


def _overlaps(facts: Facts) -> bool:
    return facts.settings.overlaps and facts.settings.optimizer is not None


def _no_optimizer(facts: Facts) -> bool:
    is_whole = not isinstance(facts.model, DistributedDataParallel)
    return (
        is_whole and facts.settings.optimizer is None and not has_dtensors(facts.params)
    )


def _set(field: str, default: Any) -> Callable[[Facts], Any]:
    """A field of the options or of the failure policy, where it is not the default."""

    def find(facts: Facts) -> Any:
        value = facts.settings.fields[field]
        return False if value == default else value or repr(value)

    return find


def _ranks_per_host(facts: Facts) -> str:
    number = facts.settings.ranks_per_host
    return f"hosts of {number} ranks" if number > 1 else ""


def _num_shards(facts: Facts) -> int | None:
    given = facts.settings.options.shards
    return given.size() if given is not None and given.size() > 1 else None


DTENSORS = "DTensors (fully_shard)"
HALF = "scaler, float16 parameters"
ADAPTS = "adapt"
CUT_ROWS = "sparse rows of DTensors"
_FIELDS = [one for kind in BOTH.values() for one in fields(kind)]
FEATURES: dict[str, Callable[[Facts], Any]] = {
    "a plan": lambda facts: facts.settings.plan and "a plan",
    "a plan with overlap": _overlaps,
    "auto": lambda facts: facts.settings.pilot,
    "momentum correction": _no_gradients,
    ADAPTS: lambda facts: (
        chooser_of(facts.settings.exchange) and facts.settings.exchange
    ),
    LOCAL: lambda facts: facts.way == LOCAL,
    REDUCE_SCATTER: lambda facts: facts.way == REDUCE_SCATTER,
    "DDP": lambda facts: isinstance(facts.model, DistributedDataParallel),
    DTENSORS: lambda facts: has_dtensors(facts.params),
    "mesh": _ranks_per_host,
    "sparse rows": lambda facts: next(iter(_rows(facts)), ""),
    CUT_ROWS: lambda facts: next(
        (n for n in _rows(facts) if is_dtensor(dict(facts.params)[n])), ""
    ),
    HALF: _half,
    **{one.name: _set(one.name, one.default) for one in _FIELDS},
    "shards": _num_shards,
    # What only cautions ask for.
    "an overlapping plan": lambda facts: facts.settings.overlaps,
    "no optimizer": _no_optimizer,
    "momentum in the exchange": lambda facts: momentum_of(facts.settings.exchange),
    "momentum in the optimizer": _twice,
    "a collective without rows": _without_rows,
    "sparse rows that take it": _rows_asked,
}


class RefusedPair(NamedTuple):
    """Two features that do not go together, and the parts of the user's sentence.

    ``accepted`` and ``what``, by default the first feature, may have {0} and {1}, the
    values of the two. The value that is shown is ``given``, by default the first one's.
    """

    first: str
    second: str
    accepted: str
    remedy: str
    what: str = ""
    given: str = ""

    def error(self, first: Any, second: Any = None) -> InvalidSetting:
        """The error that is raised for these values."""
        what = self.what or self.first
        accepted = self.accepted
        texts = (
            what.format(first, second),
            self.given or first,
            accepted.format(first, second),
        )
        return invalid(*texts, self.remedy)


class Caution(NamedTuple):
    """Two features that go together, of which a warning says what becomes."""

    first: str
    second: str
    text: str


_OUT = "leave it out"
_INSTEAD = "attach an exchange, or a plan, instead"
_IN_FULL = (
    "keep parameters in float32 and compute in autocast, or attach 'none' or 'cast16'"
)
_GO_ON = "leave on_failure out, and restart from a checkpoint"
_NO_PLAN = "a compressor or an exchange, as plans follow the backward pass"
_ITSELF = "give the exchange itself, compress_if= and delay="
_GATHERED = "call gw.attach, or train a model that is whole on each rank"
_GRADIENTS = "an exchange of gradients, since means of momentum cannot be compared"
_DENSE = "make the embedding with sparse=False"
_FIXED = "one with fixed settings: a rank of a host knows only its own tensors' losses"
_HOSTS_SHARDS = (
    "None beside mesh=: a layer's shards and hosts of several ranks do not go together"
)
_OF_ATTACH = (
    "shards",
    "guard_every",
    "backend",
    "on_failure",
    "rejoin",
    "check_every",
    "cluster",
)
_OF_MESSAGES = ("bucket_cap_mb", "num_channels", "trace_steps", "checksums")

REFUSED: tuple[RefusedPair, ...] = (
    *(
        RefusedPair(name, way, f"left out under {way}, which has no use of it", _OUT)
        for way, names in (
            (LOCAL, _OF_ATTACH),
            (REDUCE_SCATTER, _OF_ATTACH + _OF_MESSAGES),
        )
        for name in names
    ),
    RefusedPair("shards", "mesh", _HOSTS_SHARDS, "leave one of them out"),
    RefusedPair(
        *("mesh", DTENSORS, "None beside parameters that are DTensors"),
        "write group=mesh['replicate'] instead",
    ),
    *(
        RefusedPair(name, plan, "None beside a plan, which decides it", _OUT)
        for name in ("bucket_cap_mb", "num_channels", "compress_if")
        for plan in ("a plan", "auto")
    ),
    *(
        RefusedPair(first, "auto", f"{accepted} beside {{1}}", remedy, what, given)
        for first, what, given, accepted, remedy in (
            ("shards", "", "", "None", _INSTEAD),
            ("cluster", "", "", "None, as links are measured,", _OUT),
            (DTENSORS, "model", "DTensors", "one with plain parameters", _INSTEAD),
            (
                "sparse rows",
                "the embedding of {0}",
                "sparse=True",
                "sparse=False",
                _INSTEAD,
            ),
            (HALF, "scaler", "one beside parameters in float16", "None", _IN_FULL),
        )
    ),
    *(
        RefusedPair("on_failure", other, f"'end' beside {why}", _GO_ON)
        for other, why in (
            ("DDP", "a DDP model, whose own connections break"),
            ("mesh", "hosts of several ranks, which hold shares"),
            (DTENSORS, "sharded layers (FSDP), since a lost rank holds a part"),
            ("shards", "shards=, since a lost rank holds some"),
            ("auto", "{1}, whose plan is for all ranks"),
            (
                "a plan with overlap",
                "a plan that overlaps the next forward pass: its updates cannot "
                "be undone",
            ),
        )
    ),
    RefusedPair(
        *(
            CUT_ROWS,
            DTENSORS,
            "sparse=False, as torch cuts no rows of gradients",
            _DENSE,
        ),
        what="the embedding of {0}",
        given="sparse=True",
    ),
    RefusedPair(
        *(ADAPTS, "mesh", _FIXED, "attach it without mesh=, or leave adapt out"),
        what="exchange among hosts of several ranks",
    ),
    RefusedPair(
        *("momentum correction", "guard_every", _GRADIENTS, "leave guard_every out"),
        what="exchange beside guard_every",
    ),
    *(
        RefusedPair(plan, LOCAL, _NO_PLAN, _ITSELF, "exchange")
        for plan in ("a plan", "auto")
    ),
    RefusedPair(
        DTENSORS,
        LOCAL,
        "one with plain parameters",
        _GATHERED,
        "model",
        "one with DTensors",
    ),
)
"""Every pair that is refused; where several are, the first of them is raised."""

_PLAIN = "attach the plain module to overlap it"
_NOT_OVERLAPPED = (
    "the plan asks to overlap the next forward pass, and this run does not: "
)
CAUTIONS: tuple[Caution, ...] = (
    *(
        Caution("an overlapping plan", other, f"{_NOT_OVERLAPPED}{why}")
        for other, why in (
            ("DDP", f"DDP's backward() waits for all gradients; {_PLAIN}"),
            (
                DTENSORS,
                "parameters are DTensors, whose forward pass torch itself arranges",
            ),
            (
                "no optimizer",
                "attach got no optimizer=, whose step it would have to cut",
            ),
        )
    ),
    Caution(
        "momentum in the exchange",
        "momentum in the optimizer",
        "momentum counts twice: the exchange corrects for a momentum of {0}, and {1} "
        "has its own; use torch.optim.SGD(params, lr=...) without momentum",
    ),
    Caution(
        "momentum in the exchange",
        "sparse rows",
        "row-sparse gradients get no momentum from the exchange ({1}, ...); make the "
        "embedding with sparse=False, or give its weights an optimizer with momentum",
    ),
    Caution(
        "a collective without rows",
        "sparse rows that take it",
        "row-sparse gradients ({1}, ...) cannot take {0}, and are gathered, or sent to "
        "the ranks that serve them, whichever takes less time in a step; make the "
        "embedding with sparse=False to have its gradient take it, or name a "
        "collective of rows, as zen",
    ),
)
"""Every pair that works, and is warned of."""


def found(pairs: Sequence[Any], facts: Facts) -> list[tuple[Any, Any, Any]]:
    """The table's ``pairs`` whose features are both there, with features' values."""
    values = {name: find(facts) for name, find in FEATURES.items()}
    both = [(one, values[one.first], values[one.second]) for one in pairs]
    return [one for one in both if one[1] and one[2]]


def refuse_pairs(facts: Facts) -> None:
    """Raises ``InvalidSetting`` for two features that do not go together."""
    for refusal, first, second in found(REFUSED, facts):
        raise refusal.error(first, second)


def caution(facts: Facts) -> None:
    """Warns of features that go together, and hardly mean what they say."""
    for one, first, second in found(CAUTIONS, facts):
        _log.warning("%s", one.text.format(first, second))


def refusal_of(first: str, second: str) -> RefusedPair:
    """The refusal of a pair, for checks where an attach has no facts yet."""
    return next(one for one in REFUSED if (one.first, one.second) == (first, second))
