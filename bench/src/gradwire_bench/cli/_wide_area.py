"""Options of every verb that opens hosts: how far and how unlike their links are."""

from __future__ import annotations

from typing import Annotated

import typer

from gradwire.contract.units import parse_rate

from ..testbed.wide_area import WideArea, parse_slow

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


def wide_area(
    delay_ms: float,
    jitter_ms: float,
    up: str | None,
    down: str | None,
    slow: list[str] | None,
) -> WideArea:
    """The links that these options ask for."""
    return WideArea(
        delay_s=delay_ms / 1e3,
        jitter_s=jitter_ms / 1e3,
        up_bytes_per_s=None if up is None else parse_rate(up),
        down_bytes_per_s=None if down is None else parse_rate(down),
        slow=parse_slow(slow or ()),
    )
