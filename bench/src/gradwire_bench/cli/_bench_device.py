"""`gradwire bench device`: bits, kernels, training and more on this machine's GPU."""

import sys
from typing import Annotated, Any

from gradwire.cli.report.output import AsJson, emit, progress
from gradwire.cli.report.table import Row
from gradwire.contract.units import parse_rate
from gradwire.errors import invalid

from ..report.fractions import Fractions
from ..testbed.wide_area import WideArea
from ._options import Compressors, Names, option, with_links


@with_links
def device(
    wide_area: WideArea,
    part: Annotated[
        Names,
        option(
            "One of bits, kernels, training, partition, offload, compiled "
            "[default: all]."
        ),
    ] = None,
    only: Compressors = None,
    ranks: Annotated[int, option("Processes that train on the one GPU.")] = 2,
    rate: Annotated[
        Names,
        option("Rate of their links [default: 1gbit, 10gbit]."),
    ] = None,
    minutes: Annotated[float, option("Nothing is begun after so many.")] = 8.0,
    where: Annotated[
        str,
        option("cuda, or cpu with small sizes, to try the verb.", "--device"),
    ] = "cuda",
    compile_only: Annotated[
        bool,
        option("Compile every kernel; no GPU is needed.", "--compile-only"),
    ] = False,
    target: Annotated[
        Names,
        option("With it: GPUs [default: sm_80, sm_90]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a GPU in minutes: bits, compressors beside torch, training, ZEN's
    partition, offload.

    With --compile-only: registers and stack of every Triton kernel, for GPUs that need
    not be there.
    """
    if compile_only:
        _compile(target, only, as_json)
        return
    if target:
        raise invalid("--target", target, "with --compile-only", "add it")
    from ..micro import device as bench
    from ..micro import kernel

    keywords: dict[str, Any] = {
        "device": where,
        "parts": tuple(part or bench.PARTS),
        "ranks": ranks,
        "wide_area": wide_area,
    }
    if rate:
        keywords["rates_bytes_per_s"] = tuple(map(parse_rate, rate))
    made = bench.DeviceBench.small if where == "cpu" else bench.DeviceBench
    settings = made(**keywords, minutes=minutes)

    def announce(row: Row) -> None:  # a run that is cut short has told what it knew
        print(bench.line(row), file=sys.stderr if as_json else sys.stdout, flush=True)

    with progress("bench device", total=1) as advance:
        codecs = kernel.shipped(only or ())
        rows, notes = bench.run(
            settings, Fractions(advance), codecs=codecs, announce=announce
        )
    emit(
        "bench device",
        rows,
        as_json=as_json,
        title=f"bench device on {where}",
        notes=notes,
    )


def _compile(targets: Names, only: Names, as_json: bool) -> None:
    from ..micro import ahead

    with progress("bench device --compile-only"):
        rows = ahead.compile_all(tuple(targets or ahead.TARGETS), tuple(only or ()))
    title = f"{len(rows)} kernels, compiled ahead of time"
    emit("bench device --compile-only", rows, as_json=as_json, title=title)
