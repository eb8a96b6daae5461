"""Cautions: warnings about settings of attach that work, and hardly mean what they say."""

from __future__ import annotations

import logging
import sys
from functools import cache

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..exchange.by_name import momentum_of, named_collective
from ..planning.default_fusion import NamedParam
from .grid.dtensors import has_dtensors
from .settings import Settings, sparse_weights

_log = logging.getLogger("gradwire")

TRIED = {"Python": ((3, 11), (3, 11)), "torch": ((2, 13), (2, 14))}
"""The oldest and the newest that the tests were run with: docs/versions.md has the table."""


@cache
def warn_of_versions(
    python: tuple[int, ...] = sys.version_info[:2], torch_version: str = str(torch.__version__)
) -> None:
    """Warns, once a process, of versions with which nobody has tried gradwire."""
    own = {"Python": python, "torch": tuple(map(int, torch_version.split(".")[:2]))}
    for name, (oldest, newest) in TRIED.items():
        if not oldest <= own[name] <= newest:
            given, first, last = (".".join(map(str, one)) for one in (own[name], oldest, newest))
            _log.warning(
                "%s %s: gradwire was tried with %s to %s; the page Versions (docs/versions.md) has "
                "the table",
                *(name, given, first, last),
            )


def caution(model: nn.Module, params: list[NamedParam], settings: Settings) -> None:
    """Gives every warning there is about a model whose gradients are exchanged."""
    _warn_of_no_overlap(model, params, settings)
    warn_of_two_momenta(settings, settings.optimizer)
    _warn_of_no_momentum(model, params, settings)
    _warn_of_another_way(model, params, settings)


def _warn_of_no_overlap(model: nn.Module, params: list[NamedParam], settings: Settings) -> None:
    """Warns where a plan that overlaps the next forward pass is carried out without overlap."""
    if not settings.overlaps:
        return
    if isinstance(model, DistributedDataParallel):
        why = "DDP's backward() waits for all gradients; attach the plain module to overlap it"
    elif has_dtensors(params):
        why = "parameters are DTensors, whose forward pass torch itself arranges"
    elif settings.optimizer is None:
        why = "attach got no optimizer=, whose step it would have to cut"
    else:
        return
    _log.warning("the plan overlaps the next forward pass, and this run does not: %s", why)


def warn_of_two_momenta(settings: Settings, optimizer: Optimizer | None) -> None:
    """Warns where the exchange and the optimizer of its means both have momentum, which then counts
    twice."""
    own = momentum_of(settings.exchange)
    groups = optimizer.param_groups if optimizer is not None else []
    twice = [group for group in groups if group.get("momentum") or group.get("betas", (0,))[0]]
    if own and twice:
        _log.warning(
            "momentum counts twice: the exchange corrects for a momentum of %s, and %s has its "
            "own; use torch.optim.SGD(params, lr=...) without momentum",
            own,
            type(optimizer).__name__,
        )


def _warn_of_no_momentum(model: nn.Module, params: list[NamedParam], settings: Settings) -> None:
    """Warns where row-sparse gradients get no momentum: their rows travel as they are, and beside
    momentum correction the optimizer should have none."""
    sparse = sparse_weights(model)
    rows = [name for name, param in params if id(param) in sparse]
    if momentum_of(settings.exchange) and rows:
        _log.warning(
            "row-sparse gradients get no momentum from the exchange (%s, ...); make the embedding "
            "with sparse=False, or give its weights an optimizer with momentum",
            rows[0],
        )


def _warn_of_another_way(model: nn.Module, params: list[NamedParam], settings: Settings) -> None:
    """Warns where rows cannot take the user's collective, and names what they take instead."""
    sparse, named = sparse_weights(model), named_collective(settings.exchange)
    rows = [name for name, p in params if id(p) in sparse and settings.compress_if(name, p)]
    if named is not None and rows and not named.carries_rows:
        _log.warning(
            "row-sparse gradients (%s, ...) cannot take %r, and are gathered, or sent to the ranks "
            "that serve them, whichever takes less time in a step; make the embedding with "
            "sparse=False to have its gradient take it, or name allgather_sparse, zen, sparse_ps "
            "or sparse_ps_broadcast",
            rows[0],
            named,
        )
