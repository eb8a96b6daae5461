"""Options that several commands have."""

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Annotated, Any

from gradwire.cli.report.output import emit, progress
from gradwire.cli.report.table import Row
from gradwire_lab.planning.inputs import option as option

from ..report.fractions import Fractions
from ..testbed.wide_area import WideArea, read_wide_area

Delay = Annotated[float, option("Milliseconds that each packet takes one way.")]
Jitter = Annotated[float, option("Milliseconds more, evenly drawn up to this.")]
Up = Annotated[str | None, option("Rate of what a host sends [default: --rate].")]
Down = Annotated[str | None, option("Rate of what a host receives [default: --rate].")]
Slow = Annotated[
    list[str] | None,
    option("HOST=RATE: another rate of one host; may be repeated."),
]
Names = list[str] | None
"""The values of an option that may be repeated."""
Turns = Annotated[int, option("Turns that are measured, after one more.")]
NumElements = Annotated[int, option("Elements of the float32 gradient.")]
RanksPerHost = Annotated[int, option("Ranks that share a host's link.")]
LinkRate = Annotated[str, option("Rate of each host's link.")]
SingleRankHosts = Annotated[int, option("How many hosts, one rank each.")]
NumHosts = Annotated[int, option("How many hosts.")]
Device = Annotated[str, option("Where: cpu or cuda.")]
Planners = Annotated[Names, option("Only these planners.")]
Compressors = Annotated[Names, option("Only these compressors; default: all.")]
NumSteps = Annotated[int, option("Training steps for each method.")]
TaskName = Annotated[str, option("text, perceptron, gpt, lstm, convnet or fashion.")]


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
