"""Look at this machine and measure its link; prints Markdown to paste into an issue."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ...contract.units import format_bytes
from ...errors import GradwireError
from ..report.output import emit, progress
from ..report.table import Row, markdown
from . import _diagnosis as diagnosis

if TYPE_CHECKING:
    from ...planning.measure.allreduce import LinkReport

app = typer.Typer(help=__doc__)

NOISY = 0.25
"""Relative error of the fit above which alpha and beta should not be relied on."""


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    link: Annotated[bool, typer.Option(help="Measure alpha and beta of the link.")] = True,
) -> None:
    """Look at this machine and measure its link; prints Markdown to paste into an issue.

    Started by torchrun, the link between its ranks is measured and rank 0 prints; otherwise the
    loopback between two processes.
    """
    report = _measured() if link else None
    if int(os.environ.get("RANK", "0")) != 0:
        return
    sections = _sections(report)
    if json:
        rows = [{**row, "section": title} for title, rows in sections.items() for row in rows]
        emit("doctor", rows, as_json=True, title="")
        return
    print("# gradwire doctor")
    for title, rows in sections.items():
        print(f"\n## {title}\n\n{markdown(rows) if rows else 'none'}")


def _sections(report: LinkReport | None) -> dict[str, list[Row]]:
    interfaces, backends = diagnosis.interfaces(), diagnosis.backends()
    shaper, kernels, gpus = diagnosis.shaper(), diagnosis.kernels(), diagnosis.gpus()
    versions = diagnosis.versions()
    named = {one: diagnosis.naming_s(one) for one in diagnosis.outer_addresses(interfaces)}
    sections = {
        "Machine": versions,
        "Back ends": backends,
        "Interfaces": interfaces,
        "Testbed": shaper,
        "Kernels": kernels,
        "GPU": gpus,
        "Environment": diagnosis.environment(),
    }
    warnings = [
        *diagnosis.network_warnings(interfaces, os.environ, diagnosis.host_address()),
        *diagnosis.naming_warnings(named),
        *diagnosis.thread_warnings(os.environ, len(os.sched_getaffinity(0))),
        *diagnosis.part_warnings(shaper, kernels, gpus, backends, versions),
    ]
    if report is not None:
        sections["Link"] = fit_rows(report)
        sections["All-reduces"] = [
            {"name": format_bytes(size_bytes), "median_s": seconds}
            for size_bytes, seconds in report.fit.samples
        ]
        sections["Path"] = path_rows(report)
        warnings += link_warnings(report)
    return sections | {"Warnings": warnings}


def fit_rows(report: LinkReport) -> list[Row]:
    """The measured link as a row: seconds = alpha + beta * bytes of an all-reduce."""
    where = "loopback" if "RANK" not in os.environ else "group"
    return [
        {
            "name": f"{where}, {report.world} ranks, {report.backend}",
            "alpha_s": report.fit.alpha_s,
            "beta_s_per_byte": report.fit.per_unit_s,
            "fraction_residual": report.fit.residual,
            "rate_bytes_per_s": report.rate_bytes_per_s,
        }
    ]


def path_rows(report: LinkReport) -> list[Row]:
    """The path of a gradient to the wire and back, with the seconds of each part."""
    absent = f"absent: {report.backend} sends from memory of {report.device}"
    by = {"wire": report.backend}
    return [
        {"name": part, "median_s": s, "where": absent if s is None else by.get(part, report.device)}
        for part, s in report.path.items()
    ]


def link_warnings(report: LinkReport) -> list[Row]:
    """Whether the fit can be relied on."""
    found = report.fit
    if found.residual <= NOISY and found.alpha_s > 0 and found.per_unit_s > 0:
        return []
    problem = f"the fit misses the times by {100 * found.residual:.0f} % or lacks a term"
    remedy = "something else uses the machine or the link: repeat when it is quiet"
    return [{"name": "link", "problem": problem, "remedy": remedy}]


def _measured() -> LinkReport:
    from ...planning.measure import allreduce

    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        with progress("measuring the loopback"):
            return allreduce.measure_loopback()
    with progress("measuring the link", total=len(allreduce.SIZES_BYTES)) as advance:
        try:
            return allreduce.measure_launched(advance=advance)
        except RuntimeError as error:
            raise GradwireError(
                f"the link could not be measured: {error}; check that MASTER_ADDR and the "
                "interface in GLOO_SOCKET_IFNAME can be reached from every host, or leave the "
                "measurement out with --no-link"
            ) from error
