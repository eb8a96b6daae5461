"""Rank programs in ranks that are forked: torch is imported already, and links are the
loopback.

A rank that is started as on hosts imports torch first, in 3 s of a core. Tests that
look at what ranks compute, and not at how they are started nor at shaped links, take
these.
"""

from __future__ import annotations

import importlib
import json
from contextlib import closing
from types import ModuleType
from typing import Any

import pytest

from gradwire_bench.testbed import ranks
from gradwire_bench.testbed.hosts import Hosts, loopback_hosts
from tests.runtime.ranks import Ranks


def fork_ranks(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, **smaller: int
) -> None:
    """A module that opens hosts and runs a rank program on them has it run in forked
    ranks.

    ``smaller`` are figures in the place of the program's own.
    """

    def run_ranks(
        hosts: Hosts, program: str, settings: object, **others: Any
    ) -> list[Any]:
        """Every rank's result; settings and results are plain JSON, as between
        programs.
        """
        with closing(Ranks(hosts.num_ranks)) as pool:
            found = pool.run(_measured, program, json.dumps(settings), smaller)
        return [json.loads(result) for result in found]

    monkeypatch.setattr(module, "open_hosts", loopback_hosts)
    monkeypatch.setattr(module, "run_ranks", run_ranks)


def run_instead(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, program: str
) -> None:
    """A module has hosts run another program, as
    ``tests.bench.brief_schedule_rank``.
    """

    def run_ranks(hosts: Hosts, _: str, *settings: Any, **others: Any) -> list[Any]:
        return ranks.run_ranks(hosts, program, *settings, **others)

    monkeypatch.setattr(module, "run_ranks", run_ranks)


def _measured(
    rank: int, world: int, program: str, settings: str, smaller: dict[str, int]
) -> str:
    found = importlib.import_module(program)
    for name, figure in smaller.items():
        assert hasattr(found, name)
        setattr(found, name, figure)
    return json.dumps(found.measure(json.loads(settings), lambda fraction, what: None))
