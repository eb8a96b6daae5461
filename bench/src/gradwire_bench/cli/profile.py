"""Measure a model's layers, and what messages and compressors cost on a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.report.links import line_row
from gradwire.cli.report.output import AsJson, emit, progress
from gradwire.cli.report.table import Row, in_sections
from gradwire.contract.registry import names
from gradwire.contract.units import parse_rate
from gradwire.errors import invalid
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import PRIMITIVES, Cluster
from gradwire.planning.data.profile import Profile
from gradwire_lab.planning.inputs import Made, from_file

from ..report.fractions import Fractions
from ..testbed.wide_area import NEAR, WideArea
from ._options import option, with_links

app = typer.Typer()

HOSTS = 4
RATE = "500mbit"
TIMEOUT_S = 900.0


@app.command()
@with_links
def profile(
    wide_area: WideArea,
    model: Annotated[
        str,
        typer.Argument(
            help="FILE.py:function, which returns (model, step); or a model of the "
            "catalogue, to measure only the cluster."
        ),
    ],
    out: Annotated[Path, option("Folder for profile.json and cluster.json.")] = Path(
        "profile"
    ),
    hosts: Annotated[
        int | None, option(f"Measure that many shaped hosts, else {HOSTS}.")
    ] = None,
    rate: Annotated[
        str | None,
        option(f"Measure shaped hosts with such links, else {RATE}."),
    ] = None,
    iterations: Annotated[int | None, option("Steps that are measured.")] = None,
    codecs: Annotated[bool, option("Measure compressors with the cluster.")] = True,
    picture: Annotated[Path | None, option("Write a picture (PNG) here.")] = None,
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
    is_catalogued = model_and_step is None
    is_shaped = rate is not None or wide_area != NEAR
    asked = is_catalogued or hosts is not None or is_shaped
    measured = None if model_and_step is None else _profiled(model_and_step, iterations)
    cluster = _cluster(hosts, rate, codecs, asked, wide_area)
    if int(os.environ.get("RANK", "0")) != 0:
        return
    _save(measured, cluster, out)
    _show(measured, cluster, as_json)
    if picture is not None:
        from ..report.profile_pictures import draw

        layers = () if measured is None else measured.layers
        draw(layers, cluster, picture, title=model)
    if not as_json:
        typer.echo(f"written to {out}")


def _save(measured: Profile | None, cluster: Cluster | None, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in (("profile.json", measured), ("cluster.json", cluster)):
        if made is not None:
            made.save(folder / name)


def _cluster(
    hosts: int | None,
    rate: str | None,
    codecs: bool,
    asked: bool,
    wide_area: WideArea,
) -> Cluster | None:
    """Measures the ranks that torchrun started or, where asked for, shaped hosts.

    Where no hosts can be made, the loopback is measured.
    """
    from ..testbed import measured

    compressors = names("compress") if codecs else ()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        for name, given, default in (
            ("--hosts", hosts, None),
            ("options of links", wide_area, NEAR),
        ):
            if given != default:
                raise invalid(
                    name, given, "left out under torchrun", "it measures its own ranks"
                )
        from gradwire.measure.group import launched_group

        known = None if rate is None else parse_rate(rate)
        with progress("measuring the ranks", total=1) as advance, launched_group():
            report = Fractions(advance)
            return measured.measure_group_links(
                report, compressors=compressors, rate_bytes_per_s=known
            )
    if not asked:
        return None
    if (hosts := hosts or HOSTS) < 2:
        raise invalid("--hosts", hosts, "2 or more", "a link joins at least two")
    rate_bytes_per_s = parse_rate(rate or RATE)
    with progress(f"measuring {hosts} hosts", total=1) as advance:
        return measured.measured_cluster(
            hosts,
            rate_bytes_per_s,
            compressors,
            Fractions(advance),
            timeout_s=TIMEOUT_S,
            wide_area=wide_area,
        )


def _profiled(made: Made, iterations: int | None) -> Profile:
    from gradwire.measure.layers import NUM_WARM_UP
    from gradwire.measure.layers import profile as profile_model

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
