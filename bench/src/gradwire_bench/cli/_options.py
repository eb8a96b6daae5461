"""Options that several commands have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Annotated, Any

import typer

from gradwire.cli.report.links import Delay, Down, Jitter, Slow, Up
from gradwire.cli.report.output import Fractions, emit, progress
from gradwire.cli.report.table import Row

from ..testbed.wide_area import WideArea, read_wide_area

Names = list[str] | None
"""The values of an option that may be repeated."""
Turns = Annotated[int, typer.Option(help="Turns that are measured, after one more.")]
NumElements = Annotated[int, typer.Option(help="Elements of the float32 gradient.")]
RanksPerHost = Annotated[int, typer.Option(help="Ranks that share a host's link.")]
LinkRate = Annotated[str, typer.Option(help="Rate of each host's link.")]
SingleRankHosts = Annotated[int, typer.Option(help="How many hosts, one rank each.")]
BothThreads = Annotated[int, typer.Option(help="OpenMP threads of both sides.")]
NumHosts = Annotated[int, typer.Option(help="How many hosts.")]
Device = Annotated[str, typer.Option(help="Where: cpu or cuda.")]
Planners = Annotated[Names, typer.Option(help="Only these planners.")]
Compressors = Annotated[
    Names, typer.Option(help="Only these compressors; default: all.")
]
NumSteps = Annotated[int, typer.Option(help="Training steps for each method.")]
TaskName = Annotated[
    str, typer.Option(help="text, perceptron, gpt, lstm, convnet or fashion.")
]


def _links(
    delay: Delay = 0.0,
    jitter: Jitter = 0.0,
    up: Up = None,
    down: Down = None,
    slow: Slow = None,
) -> WideArea:
    return read_wide_area(delay, jitter, up, down, slow)


def with_links(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose argument ``wide_area`` comes from options of links."""
    links = inspect.signature(_links, eval_str=True).parameters
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own["wide_area"]
    parameters = [*own.values(), *links.values()]

    @wraps(command)
    def called(**given: Any) -> None:
        wide_area = _links(**{name: given.pop(name) for name in links})
        command(wide_area, **given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def run_and_show(
    verb: str,
    run: Callable[..., list[Row]],
    settings: object,
    title: str,
    as_json: bool,
    hidden: Collection[str] = (),
) -> None:
    """Runs a benchmark behind a progress bar, and shows its rows."""
    with progress(verb, total=1) as advance:
        rows = run(settings, Fractions(advance))
    emit(verb, rows, as_json=as_json, title=title, hidden=hidden)
