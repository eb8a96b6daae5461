"""One rank of ``gradwire doctor``, which measures torch's own all-reduce on the loopback."""

from __future__ import annotations

from typing import Any

from gradwire_bench.testbed.ranks import Report

from . import allreduce


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The link's report; there are no settings."""
    return allreduce.measure().model_dump()
