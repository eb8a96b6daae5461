"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Turns = Annotated[int, typer.Option(help="Turns that are measured, after one more.")]
NumElements = Annotated[int, typer.Option(help="Elements of the float32 gradient.")]
RanksPerHost = Annotated[int, typer.Option(help="Ranks that share a host's link.")]
LinkRate = Annotated[str, typer.Option(help="Rate of each host's link.")]
SingleRankHosts = Annotated[int, typer.Option(help="How many hosts, one rank each.")]
BothThreads = Annotated[int, typer.Option(help="OpenMP threads of both sides.")]
NumHosts = Annotated[int, typer.Option(help="How many hosts.")]
Device = Annotated[str, typer.Option(help="Where: cpu or cuda.")]
Planners = Annotated[list[str] | None, typer.Option(help="Only these planners.")]
Compressors = Annotated[
    list[str] | None, typer.Option(help="Only these compressors; default: all.")
]
NumSteps = Annotated[int, typer.Option(help="Training steps for each method.")]
TaskName = Annotated[
    str, typer.Option(help="text, perceptron, gpt, lstm, convnet or fashion.")
]
