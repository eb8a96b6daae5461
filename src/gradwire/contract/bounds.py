"""Numbers that a user gives, refused where they are none or out of bounds.

Every setting has an upper bound as well: what lies beyond is refused with a word, where
it would otherwise end in a crash, in garbage or in memory that no machine has.
"""

from ..errors import invalid

MOST = 2**63 - 1
"""The largest whole number that a kernel is given."""

MOST_SEED = 2**64 - 1

_LEAST_SHARE = 5e-324
"""The number next to 0: one element of whatever is left."""


def check_whole(
    what: str,
    value: object,
    remedy: str,
    *,
    least: int = 1,
    most: int = MOST,
    multiple: int = 1,
) -> None:
    """Refuses all but whole numbers from ``least`` to ``most``, of ``multiple`` each.

    >>> from gradwire.errors import InvalidSetting
    >>> try:
    ...     check_whole("rank", 0, "leave it at 4")
    ... except InvalidSetting as error:
    ...     print(error)
    rank must be a whole number, 1 to 2**63 - 1, got 0; leave it at 4
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most or value % multiple:  # type: ignore[operator]
        kind = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
        raise invalid(what, value, f"{kind}, {least} to {_written(most)}", remedy)


def _written(number: int) -> str:
    """A bound as people write it.

    >>> _written(64), _written(2**24), _written(2**32 - 1)
    ('64', '2**24', '2**32 - 1')
    """
    bits = (number - 1).bit_length()
    below = 2**bits - number
    if bits < 16 or below > 64:
        return str(number)
    return f"2**{bits} - {below}" if below else f"2**{bits}"


def check_number(
    what: str, value: object, accepted: str, remedy: str, *bounds: float
) -> None:
    """Refuses all but numbers within ``bounds``, least and most; NaN is none of them.

    ``accepted`` says the bounds in words.
    """
    least, most = bounds
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]  # checked just before
        raise invalid(what, value, accepted, remedy)


def check_share(setting: str, value: object) -> None:
    """Refuses what is no share of a gradient, such as a density."""
    check_number(
        setting, value, "a fraction in (0, 1]", "write 0.01 for 1 %", _LEAST_SHARE, 1
    )


def check_choice(what: str, value: object, accepted: tuple[object, ...]) -> None:
    """Refuses all but the values in ``accepted``."""
    if value not in accepted:
        raise invalid(
            what,
            value,
            f"{', '.join(map(repr, accepted[:-1]))} or {accepted[-1]!r}",
            "choose one of them",
        )
