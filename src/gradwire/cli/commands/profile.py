"""Measure a model's layers, and what messages and compressors cost on a cluster."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...contract.registry import extension, names
from ...contract.units import parse_rate
from ...errors import InvalidSetting, invalid
from ...planning import catalogue
from ...planning.data.cluster import PRIMITIVES, Cluster
from ...planning.data.profile import Profile
from ..report.links import Delay, Down, Jitter, Slow, Up, line_row
from ..report.output import AsJson, Fractions, emit, progress
from ..report.table import Row, in_sections

if TYPE_CHECKING:
    from torch import nn

app = typer.Typer()

HOSTS = 4
RATE = "500mbit"
TIMEOUT_S = 900.0


@app.command()
def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="FILE.py:function, which returns (model, step); or a model of the "
            "catalogue, to measure only the cluster."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for profile.json and cluster.json.")
    ] = Path("profile"),
    hosts: Annotated[
        int | None, typer.Option(help=f"Measure that many shaped hosts, else {HOSTS}.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help=f"Measure shaped hosts with such links, else {RATE}."),
    ] = None,
    delay: Delay = 0.0,
    jitter: Jitter = 0.0,
    up: Up = None,
    down: Down = None,
    slow: Slow = None,
    iterations: Annotated[
        int | None, typer.Option(help="Steps that are measured.")
    ] = None,
    codecs: Annotated[
        bool, typer.Option(help="Measure compressors with the cluster.")
    ] = True,
    picture: Annotated[
        Path | None, typer.Option(help="Write a picture (PNG) here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model's layers, and what messages and compressors cost on a cluster.

    step() runs one forward and backward on one batch. Started by torchrun, the cluster
    is the group of its ranks, each of which profiles; otherwise --hosts, --rate or an
    option of links asks for shaped hosts.
    """
    if iterations is not None and iterations < 1:
        raise invalid("iterations", iterations, "1 or more", "write --iterations 20")
    model_and_step = from_file(model) if ":" in model else None
    if model_and_step is None:
        catalogue.load(model)  # or an error that lists the names
    links = None
    if delay or jitter or up or down or slow:
        links = _testbed().read_wide_area(delay, jitter, up, down, slow)
    is_catalogued = model_and_step is None
    asked = is_catalogued or hosts is not None or rate is not None or links is not None
    measured = None if model_and_step is None else _profiled(model_and_step, iterations)
    cluster = _cluster(hosts, rate, codecs, asked, links)
    if int(os.environ.get("RANK", "0")) != 0:
        return
    _save(measured, cluster, out)
    _show(measured, cluster, as_json)
    if picture is not None:
        layers = () if measured is None else measured.layers
        pictures = extension("pictures", "a picture (gradwire profile --picture)")
        pictures.draw(layers, cluster, picture, title=model)
    if not as_json:
        typer.echo(f"written to {out}")


def _save(measured: Profile | None, cluster: Cluster | None, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in (("profile.json", measured), ("cluster.json", cluster)):
        if made is not None:
            made.save(folder / name)


def _testbed() -> Any:
    return extension("testbed", "a measurement of hosts (gradwire profile)")


def _cluster(
    hosts: int | None, rate: str | None, codecs: bool, asked: bool, links: Any
) -> Cluster | None:
    """Measures the ranks that torchrun started or, where asked for, shaped hosts.

    Where no hosts can be made, gradwire-bench measures the loopback.
    """
    compressors = names("compress") if codecs else ()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        for name, given in (("--hosts", hosts), ("options of links", links)):
            if given is not None:
                raise invalid(
                    name, given, "left out under torchrun", "it measures its own ranks"
                )
        from ...measure.group import launched_group
        from ...measure.links import measure_group_links

        known = None if rate is None else parse_rate(rate)
        with progress("measuring the ranks", total=1) as advance, launched_group():
            report = Fractions(advance)
            return measure_group_links(
                report, compressors=compressors, rate_bytes_per_s=known
            )
    if not asked:
        return None
    if (hosts := hosts or HOSTS) < 2:
        raise invalid("--hosts", hosts, "2 or more", "a link joins at least two")
    rate_bytes_per_s = parse_rate(rate or RATE)
    testbed = _testbed()
    with progress(f"measuring {hosts} hosts", total=1) as advance:
        made: Cluster = testbed.measured_cluster(
            hosts,
            rate_bytes_per_s,
            compressors,
            Fractions(advance),
            timeout_s=TIMEOUT_S,
            wide_area=links,
        )
    return made


Made = tuple["nn.Module", Callable[[], object]]


def from_file(where: str) -> Made:
    """The (model, step) that ``function`` of ``FILE.py`` returns."""
    from torch import nn

    name, _, function = where.rpartition(":")
    path = Path(name)
    remedy = (
        "write gradwire profile train.py:build, where build() returns (model, step)"
    )
    if not path.is_file():
        raise invalid(
            "model", where, "FILE.py:function with a file that exists", remedy
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise invalid("model", where, "FILE.py:function with a Python file", remedy)
    module = importlib.util.module_from_spec(spec)
    # As Python does for a script: its neighbours can be imported, and classes find
    # their module.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise invalid("model", where, f"a function that {path.name} defines", remedy)
    made: Any = build()
    if not (
        isinstance(made, tuple)
        and len(made) == 2
        and isinstance(made[0], nn.Module)
        and callable(made[1])
    ):
        raise InvalidSetting(
            f"{function}() of {path.name} must return (model, step), a torch.nn.Module "
            f"and a callable, got {type(made).__name__}; {remedy}"
        )
    return made


def _profiled(made: Made, iterations: int | None) -> Profile:
    from ...measure.layers import NUM_WARM_UP
    from ...measure.layers import profile as profile_model

    model, step = made
    total = None if iterations is None else NUM_WARM_UP + iterations
    with progress("profiling", total=total) as advance:
        return profile_model(model, step, iterations=iterations, advance=advance)


def _show(measured: Profile | None, cluster: Cluster | None, as_json: bool) -> None:
    sections = {}
    if measured is not None:
        sections[f"{measured.model}: {measured.source}"] = _layer_rows(measured)
    if cluster is not None:
        sections[f"messages: {cluster.source}"] = _link_rows(cluster)
    if cluster is not None and cluster.codecs:
        sections["codecs, by a million elements"] = _codec_rows(cluster)
    if as_json:
        emit("profile", in_sections(sections), as_json=True, title="")
        return
    for title, rows in sections.items():
        emit("profile", rows, as_json=False, title=title)
        typer.echo()


def _layer_rows(measured: Profile) -> list[Row]:
    """A row for each layer, and one for all."""
    forward_s = measured.forward_s
    backward_s = measured.backward_s
    every = [
        (layer.name, layer.size_bytes, layer.forward_s, layer.backward_s)
        for layer in measured.layers
    ]
    every.append(("step", measured.size_bytes, forward_s, backward_s))
    step_s = forward_s + backward_s
    return [
        {
            "name": name,
            "size_bytes": size_bytes,
            "forward_s": forward_s,
            "backward_s": backward_s,
            "fraction_of_step": (forward_s + backward_s) / step_s if step_s else 0.0,
        }
        for name, size_bytes, forward_s, backward_s in every
    ]


def _link_rows(cluster: Cluster) -> list[Row]:
    return [line_row(verb, line) for verb, line in cluster.collectives.items()]


def _codec_rows(cluster: Cluster) -> list[Row]:
    return [
        {
            "name": f"{name} {primitive}",
            "alpha_s": line.alpha_s,
            "million_s": 1e6 * line.per_unit_s,
            "fraction_residual": line.residual,
        }
        for name, fit in cluster.codecs.items()
        for primitive in PRIMITIVES
        for line in (getattr(fit, primitive),)
        if not line.is_nothing
    ]
