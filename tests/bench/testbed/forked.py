"""Rank programs in ranks that are forked: torch is imported already, and links are the loopback.

A rank that is started as on hosts imports torch first, in 3 s of a core. Tests that look at what
ranks compute, and not at how they are started nor at shaped links, take these.
"""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

import pytest

from gradwire_bench.testbed.hosts import Hosts, loopback_hosts
from tests.runtime.ranks import Ranks


def fork_ranks(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """A module that opens hosts and runs a rank program on them has it run in forked ranks."""
    monkeypatch.setattr(module, "open_hosts", loopback_hosts)
    monkeypatch.setattr(module, "run_ranks", _run_ranks)


def _run_ranks(
    hosts: Hosts, program: str, settings: dict[str, Any], *, timeout_s: float, **others: Any
) -> list[Any]:
    """Every rank's result; settings and results are plain JSON, as between programs."""
    ranks = Ranks(hosts.num_ranks)
    try:
        found = ranks.run(_measured, program, json.dumps(settings))
    finally:
        ranks.close()
    return [json.loads(result) for result in found]


def _measured(rank: int, world: int, program: str, settings: str) -> str:
    measure = importlib.import_module(program).measure
    return json.dumps(measure(json.loads(settings), lambda fraction, what: None))
