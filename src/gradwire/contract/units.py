"""Quantities as people write and read them; inside are bytes and seconds alone."""

import re

from ..errors import invalid

_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def split(text: str) -> tuple[float, str] | None:
    """The number and the unit in a text, in lower case.

    None where it has another form.
    """
    matched = re.fullmatch(r"\s*([0-9]{0,30}\.?[0-9]{1,30})\s*([a-zA-Z]*)\s*", text)
    return (float(matched[1]), matched[2].lower()) if matched else None


def parse_rate(text: str) -> float:
    """Reads a link rate such as ``500mbit`` or ``10gbit``; returns bytes per second.

    >>> parse_rate("200mbit")
    25000000.0
    """
    parts = split(text)
    if parts is None or parts[1] not in _BITS_PER_S or parts[0] <= 0:
        raise invalid(
            "rate",
            text,
            "a positive number with bit, kbit, mbit or gbit",
            "write 500mbit",
        )
    return parts[0] * _BITS_PER_S[parts[1]] / 8


def _scaled(value: float, step: float, names: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= step and index < len(names) - 1:
        value /= step
        index += 1
    digits = 0 if index == 0 else (2 if abs(value) < 10 else 1)
    return f"{value:.{digits}f} {names[index]}"


def format_bytes(size_bytes: float) -> str:
    """Bytes in decimal units, as network tools print them.

    >>> format_bytes(1_250_000)
    '1.25 MB'
    """
    return _scaled(size_bytes, 1000.0, ("B", "kB", "MB", "GB", "TB"))


def format_rate(rate_bytes_per_s: float) -> str:
    """A link rate in bits per second.

    >>> format_rate(25_000_000.0)
    '200.0 Mbit/s'
    """
    return _scaled(
        rate_bytes_per_s * 8, 1000.0, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s")
    )


def format_seconds(seconds: float) -> str:
    """Seconds with the unit that keeps three digits.

    >>> format_seconds(0.00123)
    '1.23 ms'
    """
    for limit, factor, name in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit:
            return f"{seconds * factor:.3g} {name}"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
