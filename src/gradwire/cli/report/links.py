"""Options of every verb that opens hosts: how far and how unlike their links are."""

from __future__ import annotations

from typing import Annotated

import typer

Delay = Annotated[
    float, typer.Option(help="Milliseconds that each packet takes one way.")
]
Jitter = Annotated[
    float, typer.Option(help="Milliseconds more, evenly drawn up to this.")
]
Up = Annotated[
    str | None, typer.Option(help="Rate of what a host sends [default: --rate].")
]
Down = Annotated[
    str | None, typer.Option(help="Rate of what a host receives [default: --rate].")
]
Slow = Annotated[
    list[str] | None,
    typer.Option(help="HOST=RATE: another rate of one host; may be repeated."),
]
