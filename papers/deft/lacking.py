"""Findings of DEFT's trainings, with rows for applications whose data are not here."""

from __future__ import annotations

from collections.abc import Sequence

from ..frame import Claim, Findings, Row
from .setting import Application


def findings(
    rows: Sequence[Row],
    claims: Sequence[Claim],
    apps: Sequence[Application],
    notes: Sequence[str] = (),
) -> Findings:
    """Findings with a row for each application whose data this machine lacks.

    Such a row says how to get the data.
    """
    lacking: list[Row] = [
        {"name": "not measured", "application": one.name, "why": why}
        for one in apps
        if (why := one.missing()) is not None
    ]
    return Findings(
        (*rows, *lacking), tuple(claims), tuple(notes), complete=not lacking
    )
