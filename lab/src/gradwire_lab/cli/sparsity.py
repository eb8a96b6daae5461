"""Measure where a model's gradients are zero, and add that to its profile."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.report.output import AsJson, emit, progress
from gradwire.errors import InvalidSetting, invalid
from gradwire.measure.group import launched_group
from gradwire.planning.data.profile import Profile

from ..planning.inputs import from_file, option, read_settings
from ..planning.zeros import NUM_GRADIENTS, measure_group_sparsity, sparsity_rows

app = typer.Typer()


@app.command()
def sparsity(
    model: Annotated[
        str, typer.Argument(help="FILE.py:function, which returns (model, step).")
    ],
    profile: Annotated[
        Path,
        option("The model's profile, by gradwire profile; it is written anew."),
    ] = Path("profile/profile.json"),
    batches: Annotated[
        int | None,
        option(f"Batches, each as a rank's; else {NUM_GRADIENTS}."),
    ] = None,
    sparsifier: Annotated[
        str | None, option("Measure what this compressor takes, as dgc.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option("A setting of it, as density=0.05.", "--set"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure where a model's gradients are zero, and add that to its profile.

    step() runs one forward and backward on another batch at each call. Started by
    torchrun, the ranks share the batches.
    """
    if settings and sparsifier is None:
        raise invalid(
            "--set", settings, "given with --sparsifier", "write --sparsifier dgc"
        )
    model_and_step = from_file(model)
    values = read_settings(settings or ())
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    group = launched_group() if num_ranks > 1 else nullcontext()
    with (
        group,
        progress("looking for zeros", total=batches or NUM_GRADIENTS) as advance,
    ):
        measured = measure_group_sparsity(
            *model_and_step,
            num_gradients=batches,
            advance=advance,
            compressor=sparsifier,
            settings=values,
        )
    if int(os.environ.get("RANK", "0")) != 0:
        return  # only rank 0's host needs to have the file
    known = Profile.load(profile)
    try:
        made = known.with_sparsity(measured)
    except ValueError as error:
        raise InvalidSetting(
            f"{profile} is of another model than {model}: {error}; profile this "
            "one first"
        ) from None
    made.save(profile)
    said = "sparsity" if measured.tensors else "sparsity (no gradient is sparse)"
    emit(
        "sparsity",
        sparsity_rows(measured),
        as_json=as_json,
        title=f"{said}: {measured.source}",
    )
    if not as_json:
        typer.echo(f"written to {profile}")
