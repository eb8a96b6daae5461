"""Links: options of every verb that opens hosts, and the cost of a message."""

from typing import Annotated

import typer

from ...planning.data.fit import LineFit
from .table import Row

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


def line_row(name: str, line: LineFit) -> Row:
    """A verb's line over the bytes of its messages, as a row."""
    return {
        "name": name,
        "alpha_s": line.alpha_s,
        "beta_s_per_byte": line.per_unit_s,
        "fraction_residual": line.residual,
    }
